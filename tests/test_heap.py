"""Freed memory stays warm, and a user's own malloc settings stay in force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, torch
from ssd_fx.runtime.memory import heap
print(heap.keep_freed_memory())
def churn():  # 4 x 24 MiB at the top of the heap, freed at once
    [torch.ones(24 << 18) for _ in range(4)]
for _ in range(4): churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4): churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(**env: str) -> tuple[str, int]:
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | env | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif("MALLOC_TRIM_THRESHOLD_" in os.environ, reason="malloc is tuned from outside")
def test_pages_are_touched_once() -> None:
    kept, faults = run()
    assert kept == "True"
    assert faults < 1000  # of 98,304 pages


def test_a_tuned_malloc_is_left_alone() -> None:
    kept, _ = run(MALLOC_TRIM_THRESHOLD_="1048576", MALLOC_MMAP_THRESHOLD_="33554432")
    assert kept == "False"


HUGE = """
import torch
from ssd_fx.runtime.memory import heap
def huge_bytes():  # AnonHugePages of [heap]
    total, name = 0, ""
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            name = line.split()[-1]
        elif line.startswith("AnonHugePages:") and name == "[heap]":
            total += int(line.split()[1]) << 10
    return total
heap.keep_freed_memory()
pages = heap.HugePages()
keep = [torch.ones(24 << 18) for _ in range(4)]
print(pages.follow(), huge_bytes())
print(pages.follow(), 0)
del keep
keep = [torch.ones(24 << 18) for _ in range(8)]
print(pages.follow(), huge_bytes())
"""


def test_the_heap_lies_in_huge_pages() -> None:
    """What was there is collapsed, what comes later is huge from the start; without growth nothing is asked for."""
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this kernel gives no huge pages")
    (first, huge), (none, _), (more, all_huge) = run_huge()
    assert first > 96 << 20
    assert huge >= 90 << 20
    assert none == 0
    assert more > 90 << 20
    assert all_huge >= 180 << 20


def run_huge() -> list[tuple[int, int]]:
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", HUGE], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    return [(int(a), int(b)) for a, b in map(str.split, done.stdout.splitlines())]
