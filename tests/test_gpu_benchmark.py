"""`make gpu` without a GPU, and its benchmark on the CPU, where the figures mean nothing and the script runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    places = ["--dir", str(tmp_path / "spill"), "--results", str(tmp_path / "results")]
    return subprocess.run([sys.executable, str(SCRIPT), *places, *flags], capture_output=True, text=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "no GPU here: torch sees no CUDA device, so nothing was run and nothing was written"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_trial_on_the_cpu(tmp_path: Path) -> None:
    small = ["--layers", "1", "--width", "64", "--heads", "1", "--batch", "2", "--seq", "64", "--pairs", "2"]
    done = run(tmp_path, "--device", "cpu", "--engines", "memory,kvikio", "--total", str(8 << 20), "--no-amp", *small)
    assert done.returncode == 0, done.stderr
    written = sorted((tmp_path / "results").iterdir())
    assert [path.suffix for path in written] == [".json", ".md"]
    result = json.loads(written[0].read_text())
    assert result["system"]["device"] == "cpu: a trial of this script, not a measurement"
    assert list(result["serving"]) == ["memory"]
    assert "torch sees no CUDA device" in result["missing"]["kvikio"]
    assert [(row["engine"], row["size_mib"]) for row in result["bandwidth"]] == [("memory", 1), ("memory", 8)]
    assert [len(taken) for taken in result["steps"].values()] == [2]
    assert "| memory | 8 |" in written[1].read_text()
