"""Late writes and early reads stay within the limit of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.off_plan import LOADS_AHEAD, held_to_its_limit
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.planner.solve import solve
from ssd_fx.passes.schedule import LOAD, Choice, Item, Replay, Step, Trip
from ssd_fx.runtime.adapt.runs import FAR
from tests.passes.planner.instances import Instance, instances, limits, scheduled

# 100 bytes take a second either way.
MACHINE = Machine(1.0, 1.0, write_bw=100.0, read_bw=100.0, latency_s=0.0)
shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8])


def placed(step: Step, trips: dict[int, dict[str, object]]) -> Replay:
    choices = [Choice.OFFLOAD] * len(step.items)
    return replay(step, choices, scheduled(step, choices, trips), MACHINE)


def test_both_mean_the_same_loads_ahead() -> None:
    assert LOADS_AHEAD == FAR


@pytest.mark.parametrize(("limit", "release"), [(639, 1), (640, 2), (679, 2), (680, 3), (699, 3), (700, None)])
def test_a_write_that_may_not_end_late_is_waited_for_as_late_as_memory_allows(limit: int, release: int | None) -> None:
    """
    forward    f0   f1   f2   f3 | b4   b5     A is written behind f0, in one second
    memory A   100  100                 100
    others     200  300  540  580  600  200    so A has room behind f2 from 640 on, and until its load from 700 on
    """
    step = Step((1.0,) * 6, (200, 300, 540, 580, 600, 200), 4, (Item(100, 0, 0, 5, 5),))
    found = placed(step, {0: {"store": 0, "release": 0, "load": 5}})
    assert found.memory == (300, 400, 540, 580, 600, 300)
    held = held_to_its_limit(found, limit, MACHINE, late=True)
    trip = held.schedule[0]
    assert (trip.blocks, trip.release.at) == ((False, 0) if release is None else (True, release))
    assert held.seconds == found.seconds
    assert held_to_its_limit(found, limit, MACHINE, late=False).schedule[0].blocks is False


@pytest.mark.parametrize(("limit", "strict"), [(349, [1, 2]), (350, [2]), (449, [2]), (450, [])])
def test_a_read_that_may_not_begin_early_is_strict(limit: int, strict: list[int]) -> None:
    """Each load may come with the one two before it. All three come with b5, where 150 others are and the first is."""
    items = tuple(Item(100, 0, 0, first, 7) for first in (5, 6, 7))
    step = Step((1.0,) * 8, (0, 0, 0, 0, 0, 150, 0, 0), 4, items)
    found = placed(step, {i: {"store": 0, "release": 3, "load": 5 + i, "block": True} for i in range(3)})
    assert found.memory[5:] == (250, 200, 300)
    held = held_to_its_limit(found, limit, MACHINE, late=True)
    assert [i for i, trip in held.schedule.items() if trip.is_strict] == strict
    assert held.memory == found.memory


@settings(max_examples=15, deadline=None)
@given(instances, shares)
def test_reads_that_are_not_strict_begin_early_within_the_limit(instance: Instance, share: float) -> None:
    step, at, machine = instance.step, limits(instance.step, share), instance.machine
    solved = solve(step, machine, limit=at.memory, share_bytes=at.kept)
    found = held_to_its_limit(solved, at.memory, machine, late=True)
    assert found.peak <= at.memory
    loads = [event for event in found.schedule.backward if event.kind is LOAD]
    first = {load.slot: loads[max(0, k - LOADS_AHEAD)].at for k, load in enumerate(loads)}
    change = [0] * (len(step.seconds) + 1)
    for i, trip in found.schedule.items():
        if i in found.reads and not trip.is_strict:
            change[first[i]] += step.nbytes[i]
            change[trip.load.at] -= step.nbytes[i]
    alive = 0
    for p, nbytes in enumerate(found.memory):
        alive += change[p]
        assert nbytes + alive <= max(at.memory, nbytes)


@settings(max_examples=15, deadline=None)
@given(instances, shares)
def test_a_slow_drive_stays_within_the_limit(instance: Instance, share: float) -> None:
    """If all writes are predicted to end in the forward: what ends in the backward is waited for nowhere."""
    step, at, machine = instance.step, limits(instance.step, share), instance.machine
    solved = solve(step, machine, limit=at.memory, share_bytes=at.kept)
    found = held_to_its_limit(solved, at.memory, machine, late=True)
    end = found.starts[step.forward]
    later = sum(step.nbytes[i] for i, (_, done) in found.writes.items() if done > end)
    slow = replace(machine, write_bw=machine.write_bw / 1000)
    assert replay(step, found.choices, found.schedule, slow).peak <= at.memory + later


def test_nothing_else_changes() -> None:
    trip = Trip.of(0, store=0, release=1, load=2, wait=3)
    assert trip.moved(strict=True) == Trip.of(0, store=0, release=1, load=2, wait=3, strict=True)
    assert trip.moved(strict=True).moved(block=True, strict=False) == Trip.of(
        0, store=0, release=1, load=2, wait=3, block=True
    )
