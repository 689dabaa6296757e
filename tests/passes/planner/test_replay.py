"""The replay of a step by hand, and how fast it is."""

from __future__ import annotations

import time

from ssd_fx.passes.axis import CHOICES, Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.replay import first_uses, replay
from tests.passes.planner.instances import random_instance, scheduled

ALL = frozenset({Choice.KEEP, Choice.OFFLOAD})
# 100 bytes take a second to write and two to read; a transfer is done half a second later.
SLOW = Machine(1.0, 1.0, write_bw=100.0, read_bw=50.0, latency_s=0.5)


def test_every_wait_by_hand() -> None:
    """
    compute   f0  f1  ..release..  b2 ..wait A..  b3
    writes        [A]     [B]
    reads                          [B][A]
    """
    step = Step(
        seconds=(1.0, 1.0, 1.0, 1.0),
        base=(10, 10, 10, 10),
        forward=2,
        items=(Item(200, 0, 0, 3, 3, choices=ALL), Item(100, 1, 1, 2, 2, choices=ALL)),
    )
    choices = [Choice.OFFLOAD] * 2
    placed = {0: {"store": 0, "release": 1, "load": 2, "block": True}, 1: {"store": 1, "release": 1, "load": 2}}
    found = replay(step, choices, scheduled(step, choices, placed), SLOW)
    # A is written from 1.0 to 3.0, and there at 3.5: the release behind f1, which ends at 2.0, waits for 1.5 s.
    assert found.write_stall_s == 1.5
    # B, written from 3.0 to 4.0, is still in memory when it is loaded at 3.5, and is handed back. A is read from 3.5 to
    # 7.5, and there at 8.0; b2 ends at 4.5.
    assert found.forwarded == {1}
    assert found.read_stall_s == 3.5
    assert found.starts == (0.0, 1.0, 3.5, 8.0, 9.0)
    assert found.seconds == 9.0
    assert found.memory == (210, 310, 310, 210)
    assert found.written == 300


def test_what_recomputing_needs_is_there_as_early() -> None:
    """The third is computed of the second, that of the first. Only the first is loaded."""
    any_of_three = CHOICES
    items = tuple(
        Item(100, i, i, first, first, recompute_s=1.0, choices=any_of_three, needs=(i - 1,) if i else ())
        for i, first in enumerate((6, 5, 4))
    )
    step = Step((1.0,) * 7, (0,) * 7, 3, items)
    assert first_uses(step, [Choice.OFFLOAD, Choice.RECOMPUTE, Choice.RECOMPUTE]) == [4, 4, 4]
    assert first_uses(step, [Choice.OFFLOAD, Choice.RECOMPUTE, Choice.KEEP]) == [5, 5, 4]
    assert first_uses(step, [Choice.OFFLOAD, Choice.KEEP, Choice.KEEP]) == [6, 5, 4]


def test_thousands_of_groups_in_milliseconds() -> None:
    """The search plays thousands of steps for a graph. Some 20 ms on a core of 2.5 GHz.

    A drive that is far behind took 1000 ms when the end of a write was looked for operator by operator.
    """
    instance = random_instance(7, items=(3000, 3000), operators=(6000, 6000))
    step = instance.step
    middle = step.forward - 1
    placed = {
        i: {
            "store": item.last_use,
            "release": min(item.last_use + 2, middle),
            "load": max(item.first_use - 2, step.forward),
        }
        for i, item in enumerate(step.items)
    }
    choices = [Choice.OFFLOAD] * len(step.items)
    schedule = scheduled(step, choices, placed)
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        replay(step, choices, schedule, instance.machine)
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.1, f"{1e3 * min(seconds):.0f} ms"
