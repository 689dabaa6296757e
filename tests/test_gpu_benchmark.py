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

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
BANDWIDTH, WAYS = BENCHMARKS / "gpu_bandwidth.py", BENCHMARKS / "gpu_ways.py"


def places(tmp_path: Path) -> list[str]:
    return ["--dir", str(tmp_path / "spill"), "--results", str(tmp_path / "results")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("path", [BANDWIDTH, WAYS], ids=lambda path: path.stem)
def test_without_a_gpu_it_says_so_and_writes_nothing(path: Path, tmp_path: Path) -> None:
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(BENCHMARKS)!r}); runpy.run_path({str(path)!r}, None, '__main__')"
    )
    done = fresh.run(script, *places(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "no GPU here: torch sees no CUDA device, so nothing was run and nothing was written"
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bandwidth_on_the_cpu(tmp_path: Path) -> None:
    small = ["--engines", "memory,posix,kvikio", "--sizes", "1", "8", "--total", str(4 << 20), "--name", "small"]
    command = [sys.executable, str(BANDWIDTH), *places(tmp_path), "--device", "cpu", "--allow-tmpfs", *small]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "results").iterdir()
    assert written.name.endswith("-small.json")
    result = json.loads(written.read_text())
    assert result["system"]["device"] == "cpu: a trial of this script, not a measurement"
    assert list(result["serving"]) == ["memory", "posix"]
    assert "torch sees no CUDA device" in result["missing"]["kvikio"]
    assert [(row["engine"], row["size_mib"]) for row in result["bandwidth"]] == [("memory", 1), ("posix", 1)]
    assert 0.0 <= result["bandwidth"][1]["cpu_s_per_gb"] < 100.0
    assert "| posix | 1 |" in done.stdout
    printed = subprocess.run([*command[:2], "--print", str(written)], capture_output=True, text=True, check=True)
    assert printed.stdout == done.stdout


@pytest.mark.slow
def test_ways_in_turns(tmp_path: Path) -> None:
    """All train one model, and what they offload differs."""
    small = ["--layers", "1", "--width", "64", "--heads", "1", "--batch", "4", "--seq", "128", "--no-amp"]
    small += ["--rounds", "2", "--warmup", "1", "--name", "small", "--allow-tmpfs", "--profile"]
    ways = ["memory:0", "memory:1.0,inflight=1MiB", "recompute:0.0", "recompute:1.0", "checkpoint", "blocks:memory:0"]
    command = [sys.executable, str(WAYS), *places(tmp_path), "--device", "cpu", *small]
    environment = {**os.environ, "SSD_FX_MACHINE": "default", "SSD_FX_MIN_BYTES": "0"}
    done = subprocess.run([*command, "--ways", *ways], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "round 3 of 3" in done.stderr
    *traces, written = sorted((tmp_path / "results").iterdir(), key=lambda path: path.suffix == ".json")
    timeline = next(path for path in traces if "memory-0" in path.name)
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    assert {"store", "release", "load", "wait"} <= {event.get("name", "").split()[0] for event in events}
    found = json.loads(written.read_text())
    assert list(found["ways"]) == ["plain", *ways]
    assert all(len(way["steps"]) == 2 and way["first_s"] > 0 and not way["ended"] for way in found["ways"].values())
    offloaded = {name: way["steps"][0]["offloaded_bytes"] for name, way in found["ways"].items()}
    assert offloaded["memory:0"] > 0
    assert {name for name, nbytes in offloaded.items() if nbytes} == {"memory:0", "blocks:memory:0"}
    assert [name for name, way in found["ways"].items() if "predicted" in way] == ways[:2]
    compiled = found["ways"]["recompute:0.0"]["steps"][0]["loss"], found["ways"]["recompute:1.0"]["steps"][0]["loss"]
    assert compiled[0] != compiled[1], "one model: each step has changed it"
    printed = subprocess.run([*command[:2], "--print", str(written)], capture_output=True, text=True, check=True)
    assert printed.stdout == done.stdout
