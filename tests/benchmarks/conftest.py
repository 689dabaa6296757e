"""The benchmarks are scripts that import each other as neighbours; the tests find them in the same way."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
