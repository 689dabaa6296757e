"""What counts as training beyond memory: the three runs, and how each can fall short."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bigger_than_memory import Run, faults

LIMIT = 1000
OUT = "RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes."
RIGHT = Run(0, (5.0, 4.0), 1.0, 0, 0, 0, 0, "")
PLAIN = Run(1, (), 0, 0, 0, 0, 0, OUT)
OURS = Run(0, (5.0, 4.0001), 1.0, 0, 0, 3000, 2900, "")


def test_it_holds() -> None:
    assert faults(LIMIT, 3.0, RIGHT, PLAIN, OURS) == []


@pytest.mark.parametrize(
    ("runs", "fault"),
    [
        ((RIGHT, replace(PLAIN, status=0, message=""), OURS), "plain Inductor does not want memory: it ended well"),
        ((RIGHT, replace(PLAIN, message="KeyError: 'x'"), OURS), "plain Inductor does not want memory: KeyError: 'x'"),
        ((RIGHT, PLAIN, replace(OURS, losses=(5.0, 4.001))), "losses are apart: (5.0, 4.001) and (5.0, 4.0)"),
        ((RIGHT, PLAIN, replace(OURS, losses=(float("nan"), 4.0))), "losses are apart: (nan, 4.0) and (5.0, 4.0)"),
        ((RIGHT, PLAIN, replace(OURS, losses=(5.0, float("nan")))), "losses are apart: (5.0, nan) and (5.0, 4.0)"),
        ((RIGHT, PLAIN, replace(OURS, losses=(5.0,))), "losses are apart: (5.0,) and (5.0, 4.0)"),
        ((RIGHT, PLAIN, replace(OURS, saved_bytes=2990)), "what is saved is only 2.99 x the limit"),
    ],
)
def test_each_way_to_fall_short(runs: tuple[Run, Run, Run], fault: str) -> None:
    assert faults(LIMIT, 3.0, *runs) == [fault]


def test_a_run_is_read_from_what_it_printed() -> None:
    steps = [{"loss": 5.0, "step_s": 9.0}, {"loss": 4.5, "step_s": 2.0, "saved_bytes": 7}]
    printed = "something else\n" + "\n".join(map(json.dumps, steps))
    found = Run.of(1, printed, f"Traceback\n  File\n{OUT}\n\nSet TORCHDYNAMO_VERBOSE=1 for more\n")
    assert found == Run(1, (5.0, 4.5), 2.0, 0, 0, 7, 0, OUT)
    assert found.wants_memory()
