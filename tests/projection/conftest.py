"""The examples are scripts; the tests find this one as it finds itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
