"""Two processes on one GPU: each has streams, I/O threads and files of its own, and half of what they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed.launch import torchrun


def job(device: str, engine: str, directory: Path) -> dict[str, Any]:
    """What rank 0 found."""
    status, output = torchrun("-m", "tests.gpu.ranks", device, engine, str(directory), timeout_s=250)
    assert status == 0, output[-4000:]
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["offloaded_bytes"] > 0
    return found


def test_gradients_of_two_ranks_are_those_of_engine_memory(tmp_path: Path) -> None:
    found = [job("cuda:0", engine, tmp_path) for engine in ("memory", "posix")]
    assert found[0]["digest"] == found[1]["digest"]
