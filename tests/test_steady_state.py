"""After two steps a training run takes nothing more: no file space, no tensor, no thread, no memory, no descriptor."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx.runtime.entries import living
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from tests.faults.toys import Toy, compile_toy, descriptors, fill_the_trace, settle

WARM = 20  # steps until the heap has its size; everything else has to stand still after two
GROWTH_BYTES = 4 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def taken() -> dict[str, object]:
    """What must not change from step to step."""
    return {
        "file space": ssd_fx.stats().disk_bytes,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": sorted(descriptors().values()),
        "entries": len(living()),
    }


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_training_run_stands_still(tmp_path: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = Toy(layers=3)  # small: a heap takes a few hundred steps to settle around tensors of 10 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    compiled = compile_toy(model, tmp_path, "posix")

    def step() -> None:
        loss = compiled(torch.randn(64, 256))
        settle()  # so that every tensor goes to the disk and back
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    fill_the_trace()
    gc.collect()
    before, written, live = taken(), ssd_fx.stats().written_bytes, CPU_ALLOCATOR.live_bytes
    sizes = []
    for _ in range(steps):
        step()
        assert taken() == before
        assert CPU_ALLOCATOR.live_bytes <= live  # what earlier tests left may die meanwhile
        sizes.append(resident_bytes())
    assert ssd_fx.stats().written_bytes - written == steps * written // 2
    assert ssd_fx.stats().read_bytes == ssd_fx.stats().written_bytes
    assert ssd_fx.stats().written_bytes == ssd_fx.stats().offloaded_bytes
    figures = f"resident {sizes[WARM] >> 10} KiB after {WARM} steps, {sizes[-1] >> 10} KiB after {steps}"
    print(f"{figures}; {before}")  # pytest -s
    assert sizes[-1] - sizes[WARM] < GROWTH_BYTES, f"memory grew by {sizes[-1] - sizes[WARM]} B"
