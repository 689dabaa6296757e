"""`make gpu` without a GPU, and its benchmark on the CPU, where the figures mean nothing and the script runs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import fresh

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def places(tmp_path: Path) -> list[str]:
    return ["--dir", str(tmp_path / "spill"), "--results", str(tmp_path / "results")]


def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SSD_FX_MACHINE": "default"}  # to measure it takes as long as the trial
    return subprocess.run(
        [sys.executable, str(SCRIPT), *places(tmp_path), *flags], env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    path = str(SCRIPT.parent)
    script = f"import runpy, sys; sys.path.insert(0, {path!r}); runpy.run_path({str(SCRIPT)!r}, None, '__main__')"
    done = fresh.run(script, *places(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "no GPU here: torch sees no CUDA device, so nothing was run and nothing was written"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_trial_on_the_cpu(tmp_path: Path) -> None:
    small = ["--layers", "1", "--width", "128", "--heads", "1", "--batch", "16", "--seq", "256", "--pairs", "2"]
    small += ["--warmup", "1", "--total", str(8 << 20), "--no-amp", "--host-budget", "1MiB"]
    done = run(tmp_path, "--device", "cpu", "--engines", "memory,kvikio", "--profile", "--predicted", *small)
    assert done.returncode == 0, done.stderr
    written = sorted((tmp_path / "results").iterdir())
    trace = written.pop(0)
    assert trace.name.endswith("-memory.trace.json.gz")
    kinds = {
        event.get("name", "").split()[0] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }
    assert {"store", "release", "load", "wait"} <= kinds
    assert [path.suffix for path in written] == [".json", ".md"]
    result = json.loads(written[0].read_text())
    assert result["system"]["device"] == "cpu: a trial of this script, not a measurement"
    assert list(result["serving"]) == ["memory"]
    assert "torch sees no CUDA device" in result["missing"]["kvikio"]
    assert [(row["engine"], row["size_mib"]) for row in result["bandwidth"]] == [("memory", 1), ("memory", 8)]
    assert [len(found["pairs"]) for found in result["steps"].values()] == [2]
    assert result["system"]["model"].endswith("float32, adamw")
    assert result["system"]["options"] == "budget 0, host budget 1MiB"
    assert result["steps"]["memory"]["kernels"]["ours"]["count"] == 0  # the CPU has no kernels of a device
    text = written[1].read_text()
    assert "| memory | 8 |" in text
    assert "## Predicted and measured, engine memory" in text
    assert (
        text
        == subprocess.run(
            [sys.executable, str(SCRIPT), "--report", str(written[0])], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize(("only", "empty"), [("--bandwidth-only", "steps"), ("--steps-only", "bandwidth")])
def test_one_half_of_it(tmp_path: Path, only: str, empty: str) -> None:
    small = ["--layers", "1", "--width", "64", "--heads", "1", "--batch", "2", "--seq", "64", "--no-amp", "--no-md"]
    small += ["--pairs", "1", "--warmup", "0", "--total", str(4 << 20), "--sizes", "1", "2", "--name", "half"]
    done = run(tmp_path, "--device", "cpu", "--engines", "posix", "--allow-tmpfs", only, *small)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "results").iterdir()
    assert written.name.endswith("-half.json")
    result = json.loads(written.read_text())
    assert not result.pop(empty)
    for row in result.get("bandwidth", ()):
        assert 0.0 <= row["cpu_s_per_gb"] < 100.0
    assert [row["size_mib"] for row in result.get("bandwidth", ())] in ([], [1, 2])


@pytest.mark.slow
def test_ways_in_turns(tmp_path: Path) -> None:
    """All train one model, and what they offload differs."""
    small = ["--layers", "1", "--width", "64", "--heads", "1", "--batch", "4", "--seq", "128", "--no-amp"]
    small += ["--pairs", "2", "--warmup", "1", "--name", "small", "--allow-tmpfs"]
    ways = ["memory:0", "memory:1.0", "recompute:0.0", "recompute:1.0"]
    command = [sys.executable, str(SCRIPT.with_name("gpu_ways.py")), *places(tmp_path), "--device", "cpu", *small]
    environment = {**os.environ, "SSD_FX_MACHINE": "default", "SSD_FX_MIN_BYTES": "0"}
    done = subprocess.run([*command, "--ways", *ways], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].endswith("round 3 of 3")
    (written,) = (tmp_path / "results").iterdir()
    found = json.loads(written.read_text())
    assert list(found["ways"]) == ["plain", *ways]
    assert all(len(way["steps"]) == 2 and way["first_s"] > 0 and not way["ended"] for way in found["ways"].values())
    offloaded = {name: way["steps"][0]["offloaded_bytes"] for name, way in found["ways"].items()}
    assert offloaded["memory:0"] > 0
    assert {name for name, nbytes in offloaded.items() if nbytes} == {"memory:0"}
    assert {name for name, way in found["ways"].items() if "predicted" in way} == {"memory:0", "memory:1.0"}
    compiled = found["ways"]["recompute:0.0"]["steps"][0]["loss"], found["ways"]["recompute:1.0"]["steps"][0]["loss"]
    assert compiled[0] != compiled[1], "one model: each step has changed it"
    printed = subprocess.run([*command[:2], "--print", str(written)], capture_output=True, text=True, check=True)
    assert printed.stdout == done.stdout
