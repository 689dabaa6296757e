"""The table of `benchmarks/fit_memory.py`, and a small run of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import expecttest
import pytest
from fit_memory import Step, over, picture, table

MIB = 1 << 20
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fit_memory.py"


def steps(*peaks: float, stay: int = 0) -> list[Step]:
    return [Step(int(peak * MIB), 0.5, 0.75, 1.0, stay * MIB, 8 * MIB, int((peak + 0.1) * MIB)) for peak in peaks]


class TestText(expecttest.TestCase):
    found: ClassVar = {"lowest": steps(10, 10), "25%": steps(10, 19.5, stay=9), "50%": steps(31, 29, stay=20)}

    def test_table(self) -> None:
        self.assertExpectedInline(
            table(self.found, {"25%": 20 * MIB, "50%": 30 * MIB}, 1),
            """\
| | limit, MiB | highest peak, MiB | held | used | counted | stays, MiB | written, MiB a step | step, s | CPU, s |
|---|---|---|---|---|---|---|---|---|---|
| lowest |  | 10.0 |  |  |  | 0.0 | 8.0 | 0.500 | 0.750 |
| 25% | 20.0 | 19.5 | yes | 97.5% | 98.0% | 9.0 | 8.0 | 0.500 | 0.750 |
| 50% | 30.0 | 31.0 | NO, 1.0 MiB over | 96.7% | 97.0% | 20.0 | 8.0 | 0.500 | 0.750 |""",
        )

    def test_steps_above_a_limit(self) -> None:
        assert over(self.found, {"25%": 20 * MIB, "50%": 30 * MIB}) == ["50%: step 0 took 31.0 MiB"]

    def test_picture(self) -> None:
        found = {**self.found, "PyTorch 0.5": steps(25, 25), "inductor": steps(40, 40)}
        drawn = picture(found, 2)
        titles = re.findall(r"<title>(.*?)</title>", drawn)
        assert titles == ["lowest", "25%", "50%", "PyTorch 0.5", "inductor"]
        assert all(name in drawn for name in ("memory=", "PyTorch's budget".replace("'", "&#x27;"), "Inductor"))


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["steady", "blocks", "micro", "amp", "fsdp", "changes"])
def test_every_step_is_within_its_limit(scene: str, tmp_path: Path) -> None:
    """The peaks are counted by a library that is preloaded. Its status says whether a step was above a limit."""
    flags = ["--quick", "--dir", str(tmp_path), "--scene", scene]
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| yes |") == 5
