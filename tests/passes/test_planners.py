"""Properties of selection and placement over random training steps, without any graph."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner import solve as planner
from ssd_fx.passes.planner.anneal import anneal
from ssd_fx.passes.planner.place import floor, place
from ssd_fx.passes.planner.refine import Solution, read_ahead, refine
from ssd_fx.passes.planner.simulate import Choice, Item, Step, simulate
from ssd_fx.passes.planner.solve import BudgetError, solve
from tests.passes.instances import Instance, instances, limits, random_instance

shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 1.0])


@settings(max_examples=15, deadline=None)
@given(instances, shares)
def test_a_plan_stays_within_the_budget(instance: Instance, share: float) -> None:
    step, at = instance.step, limits(instance.step, share)
    found = solve(step, instance.machine, limit=at.memory, share_bytes=at.kept)
    pairs = list(zip(step.items, found.choices, strict=True))
    assert found.outcome.peak <= at.memory
    assert sum(i.nbytes for i, c in pairs if c is Choice.KEEP and len(i.choices) > 1) <= at.kept
    assert all(c in i.choices for i, c in pairs)


@settings(max_examples=15, deadline=None)
@given(instances, shares)
def test_the_nodes_of_an_item_are_in_order(instance: Instance, share: float) -> None:
    step, at = instance.step, limits(instance.step, share)
    found = solve(step, instance.machine, limit=at.memory, share_bytes=at.kept)
    assert set(found.transfers) == {i for i, c in enumerate(found.choices) if c is Choice.OFFLOAD}
    for i, transfer in found.transfers.items():
        item = step.items[i]
        assert item.produced <= transfer.store_after <= transfer.release_after < step.forward
        assert transfer.release_after >= item.last_use
        assert step.forward <= transfer.load_before <= item.first_use


@settings(max_examples=15, deadline=None)
@given(instances, shares, st.sampled_from([10.0, 1000.0]))
def test_a_slower_drive_costs_time_and_no_memory_that_is_waited_for(
    instance: Instance, share: float, slower: float
) -> None:
    """Where every release waits for its write, the memory curve is what was planned, however slow the drive is."""
    step, at, machine = instance.step, limits(instance.step, share), instance.machine
    found = solve(step, machine, limit=at.memory, share_bytes=at.kept)
    blocking = {i: replace(transfer, block=True) for i, transfer in found.transfers.items()}
    slow = replace(machine, write_bw=machine.write_bw / slower, read_bw=machine.read_bw / slower)
    planned, late = (simulate(step, found.choices, blocking, m) for m in (machine, slow))
    assert late.memory == planned.memory
    assert late.peak <= at.memory
    assert late.seconds >= planned.seconds


@pytest.mark.parametrize(("seconds", "walks"), [(1e-3, 3), (1e-5, 0)])
def test_only_steps_that_lose_time_worth_the_search_are_walked(
    seconds: float, walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the step that is a hundred times as fast the stalls of ten thousand steps are less than a second of search."""
    walked = []

    def stay(step: object, machine: object, start: Solution, **_: object) -> Solution:
        walked.append(start)
        return start

    monkeypatch.setattr(planner, "WALKS", 3)
    monkeypatch.setattr(planner, "anneal", stay)
    items = (Item(1000, 0, 0, 3, 3), Item(1000, 1, 1, 2, 2))
    step = Step((seconds,) * 4, (0,) * 4, 2, items)
    rate = 500 / seconds
    machine = Machine(flops=1e9, memory_bw=1e9, write_bw=rate, read_bw=rate, latency_s=0.0, node_s=0.0)
    found = solve(step, machine, limit=floor(step), share_bytes=0)
    assert found.outcome.stall_s > 0.1 * seconds
    assert len(walked) == walks


@settings(max_examples=15, deadline=None)
@given(instances)
def test_a_budget_under_the_floor_is_an_error_that_says_the_floor(instance: Instance) -> None:
    least = floor(instance.step)
    with pytest.raises(BudgetError, match=f"a budget of {least - 1} B cannot be met; the least that can is {least} B"):
        solve(instance.step, instance.machine, limit=least - 1, share_bytes=0)
    assert solve(instance.step, instance.machine, limit=least, share_bytes=0).outcome.peak <= least


def test_the_floor_can_be_met_where_writes_end_later_than_placed() -> None:
    """Three writes in one lane at the end of the forward, and no room in the backward to hold what is not written."""
    items = (Item(4, 1, 1, 7, 7), Item(32, 1, 1, 6, 6), Item(128, 1, 3, 7, 7))
    step = Step((1e-9, 1e-6, 1e-6, 1e-9, 0.0, 0.0, 1e-9, 1e-6), (64, 0, 64, 64, 256, 0, 0, 0), 4, items)
    machine = Machine(flops=1e9, memory_bw=1e9, write_bw=1e8, read_bw=1e6, latency_s=0.0, node_s=1e-7)
    found = solve(step, machine, limit=floor(step), share_bytes=0, prefetch=1 << 20)
    assert found.outcome.peak == floor(step) == 256


@settings(max_examples=15, deadline=None)
@given(instances, st.integers(0, 3))
def test_no_more_than_the_window_is_read_ahead(instance: Instance, items: int) -> None:
    """Of what is loaded before the operator that reads it, at most `prefetch` bytes wait at a time, or one item."""
    step, prefetch = instance.step, items * 10**6
    offload = tuple(Choice.OFFLOAD if Choice.OFFLOAD in i.choices else min(i.choices, key=str) for i in step.items)
    transfers = place(step, offload, instance.machine, limit=float("inf"), prefetch=prefetch)
    assert transfers is not None
    for p in range(step.forward, len(step.seconds)):
        ahead = [step.items[i] for i, t in transfers.items() if t.load_before <= p < step.items[i].first_use]
        assert sum(i.nbytes for i in ahead) <= prefetch or len(ahead) <= 1


def offloaded(instance: Instance, limit: float) -> Solution | None:
    """All that can be offloaded, placed with a window of one item and played."""
    step, machine = instance.step, instance.machine
    choices = tuple(Choice.OFFLOAD if Choice.OFFLOAD in i.choices else min(i.choices, key=str) for i in step.items)
    transfers = place(step, choices, machine, limit=limit, prefetch=0)
    if transfers is None:
        return None
    return Solution(choices, transfers, simulate(step, choices, transfers, machine))


@pytest.mark.parametrize("walk", [False, True])
def test_moved_loads_keep_to_the_window_and_to_memory(walk: bool) -> None:
    """No more is read ahead than at the start, where the same moves without a window read more in some steps; and a
    moved load is strict exactly where memory has no room one operator earlier."""
    beyond = stricts = 0
    for instance in map(random_instance, range(20)):
        step, limit = instance.step, limits(instance.step, 0.4).memory
        if (start := offloaded(instance, limit)) is None:
            continue
        within = {"limit": limit, "share_bytes": limits(step, 0.4).kept}
        if walk:
            move = partial(anneal, step, instance.machine, start, trials=300, seed=0, **within)
        else:
            move = partial(refine, step, instance.machine, start, effort=20_000, **within)
        assert read_ahead(step, move(prefetch=0)) <= read_ahead(step, start)
        found = move()
        beyond += read_ahead(step, found) > read_ahead(step, start)
        for i, t in found.transfers.items():
            before = start.transfers.get(i)
            if t.load_before > step.forward and (before is None or before.load_before != t.load_before):
                assert t.strict == (found.outcome.memory[t.load_before - 1] + step.items[i].nbytes > limit)
                stricts += t.strict
    assert (beyond, stricts) == EXPECTED[walk]


EXPECTED = {False: (5, 5), True: (10, 5)}  # steps that read more ahead without a window, and loads that are strict
