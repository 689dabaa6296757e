"""Properties of selection and placement over random training steps, without any graph."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.passes.axis import CHOICES, Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.place import TOGETHER, Placer
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.planner.solve import BudgetError, solve
from tests.passes.planner.instances import Instance, instances, limits, undeferred

shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 1.0])


@settings(max_examples=15, deadline=None)
@given(instances, shares)
def test_a_plan_stays_within_the_budget(instance: Instance, share: float) -> None:
    step, at = instance.step, limits(instance.step, share)
    found = solve(step, instance.machine, limit=at.memory, share_bytes=at.kept)
    pairs = list(zip(step.items, undeferred(found.choices), strict=True))
    assert found.peak <= at.memory
    assert sum(i.nbytes for i, c in pairs if c is Choice.KEEP and len(i.choices) > 1) <= at.kept
    assert all(c in i.choices for i, c in pairs)


@settings(max_examples=15, deadline=None)
@given(instances, shares)
def test_the_nodes_of_an_item_are_in_order(instance: Instance, share: float) -> None:
    step, at = instance.step, limits(instance.step, share)
    found = solve(step, instance.machine, limit=at.memory, share_bytes=at.kept)
    assert set(found.schedule) == {i for i, c in enumerate(undeferred(found.choices)) if c is Choice.OFFLOAD}
    for i, trip in found.schedule.items():
        item = step.items[i]
        assert item.produced <= trip.store.at <= trip.release.at < step.forward
        assert trip.release.at >= item.last_use
        assert step.forward <= trip.load.at <= trip.wait.at <= item.first_use


@settings(max_examples=15, deadline=None)
@given(instances, shares, st.sampled_from([10.0, 1000.0]))
def test_a_slower_drive_costs_time_and_no_memory_that_is_waited_for(
    instance: Instance, share: float, slower: float
) -> None:
    """Where every release waits for its write, the memory curve is what was planned, however slow the drive is."""
    step, at, machine = instance.step, limits(instance.step, share), instance.machine
    found = solve(step, machine, limit=at.memory, share_bytes=at.kept)
    blocking = found.schedule.edited(lambda _, trip: trip.moved(block=True), step.items)
    slow = replace(machine, write_bw=machine.write_bw / slower, read_bw=machine.read_bw / slower)
    planned, late = (replay(step, found.choices, blocking, m) for m in (machine, slow))
    assert late.memory == planned.memory
    assert late.peak <= at.memory
    assert late.seconds >= planned.seconds


@settings(max_examples=15, deadline=None)
@given(instances)
def test_a_budget_under_the_floor_is_an_error_that_says_the_floor(instance: Instance) -> None:
    least = instance.step.floor
    with pytest.raises(BudgetError, match=f"a budget of {least - 1} B cannot be met; the least that can is {least} B"):
        solve(instance.step, instance.machine, limit=least - 1, share_bytes=0)
    assert solve(instance.step, instance.machine, limit=least, share_bytes=0).peak <= least


def test_what_takes_less_to_compute_than_to_move_is_computed_again() -> None:
    """No transfer is waited for. But each takes 2 ms from the cores, and one of the items 1 ms to compute."""
    everything = CHOICES
    items = [Item(10**6, at, at, 5 - at, 5 - at, again, everything) for at, again in ((0, 1e-3), (1, 3e-3))]
    step = Step((0.01,) * 6, (0,) * 6, 3, tuple(items))
    machine = Machine(1e12, 1e12, 1e12, 1e12, latency_s=0.0, drag_s_per_byte=1e-9)
    found = solve(step, machine, limit=10**7, share_bytes=0)
    assert found.choices == (Choice.RECOMPUTE, Choice.OFFLOAD)
    assert found.seconds == pytest.approx(0.06 + 1e-3 + 2e-3)


def test_an_empty_item_divides_nothing() -> None:
    """Sizes that only the run knows are those of the first step, in which an expert may have no tokens."""
    items = tuple(Item(nbytes, at, at, 5 - at, 5 - at, 1e-3, CHOICES) for at, nbytes in ((0, 0), (1, 10**6)))
    machine = Machine(1e12, 1e12, 1e8, 1e8, latency_s=0.0, node_s=1e-5)
    found = solve(Step((0.01,) * 6, (0,) * 6, 3, items), machine, limit=10**6, share_bytes=0)
    assert found.peak <= 10**6


def test_the_floor_can_be_met_where_writes_end_later_than_placed() -> None:
    """Three writes in one lane at the end of the forward, and no room in the backward to hold what is not written."""
    items = (Item(4, 1, 1, 7, 7), Item(32, 1, 1, 6, 6), Item(128, 1, 3, 7, 7))
    step = Step((1e-9, 1e-6, 1e-6, 1e-9, 0.0, 0.0, 1e-9, 1e-6), (64, 0, 64, 64, 256, 0, 0, 0), 4, items)
    machine = Machine(flops=1e9, memory_bw=1e9, write_bw=1e8, read_bw=1e6, latency_s=0.0, node_s=1e-7)
    found = solve(step, machine, limit=step.floor, share_bytes=0, prefetch=1 << 20)
    assert found.peak == step.floor == 256


def test_a_load_begins_twice_the_time_of_its_read_before_its_use() -> None:
    """100 bytes take a second to write, two to read, and are there half a second later; each operator takes one."""
    step = Step((1.0,) * 10, (0,) * 10, 2, (Item(100, produced=0, last_use=0, first_use=9, last_bwd_use=9),))
    machine = Machine(1.0, 1.0, write_bw=100.0, read_bw=50.0, latency_s=0.5)
    schedule = Placer(step, [Choice.OFFLOAD], machine, math.inf).place()
    assert schedule is not None
    assert schedule[0].load.at == 4  # the last to begin by 9.0 - 2 * 2.0 - 0.5


@pytest.mark.parametrize(("prefetch", "loads"), [(0, [2, 2, 2, 5, 6]), (400, [2, 2, 2, 2, 5]), (500, [2] * 5)])
def test_a_load_has_the_window_as_soon_as_another_was_waited_for(prefetch: int, loads: list[int]) -> None:
    """Each read takes longer than all operators. Three have room in any window, and the next begins at a use."""
    items = tuple(Item(100, produced=0, last_use=0, first_use=first, last_bwd_use=first) for first in (5, 6, 7, 8, 9))
    machine = Machine(1.0, 1.0, write_bw=100.0, read_bw=1.0, latency_s=0.0)
    step = Step((1.0,) * 10, (0,) * 10, 2, items)
    schedule = Placer(step, [Choice.OFFLOAD] * 5, machine, math.inf, prefetch).place()
    assert schedule is not None
    assert [schedule[i].load.at for i in range(5)] == loads


@settings(max_examples=15, deadline=None)
@given(instances, st.integers(0, 3))
def test_no_more_than_the_window_is_read_ahead(instance: Instance, items: int) -> None:
    """Of what is loaded before the operator that reads it, at most `prefetch` bytes wait at a time, or three items."""
    step, prefetch = instance.step, items * 10**6
    offload = tuple(Choice.OFFLOAD if Choice.OFFLOAD in i.choices else min(i.choices, key=str) for i in step.items)
    schedule = Placer(step, offload, instance.machine, math.inf, prefetch).place()
    assert schedule is not None
    for p in range(step.forward, len(step.seconds)):
        ahead = [step.items[i] for i, trip in schedule.items() if trip.load.at <= p < step.items[i].first_use]
        assert sum(i.nbytes for i in ahead) <= prefetch or len(ahead) <= TOGETHER
