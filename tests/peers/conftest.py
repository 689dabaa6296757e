"""The examples are scripts; `test_llm_analysis` finds one as it finds itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
