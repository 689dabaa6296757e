"""Properties of selection and scheduling over random lifetimes, without any graph."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import AliasGroup, Keep, Layout, Lifetime, Member, Offload, Plan, Timeline
from ssd_fx.passes.schedule import schedule
from ssd_fx.passes.select import select

PARTITION = Partition(None, None, 0)  # type: ignore[arg-type]  # the planners look at the plan only


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Forward and backward of n nodes each with random times, and up to 12 groups with random lifetimes."""
    n = draw(st.integers(4, 40))
    times = st.lists(st.floats(0, 5), min_size=n, max_size=n)
    starts = [_prefix(draw(times)), _prefix(draw(times))]
    groups, lifetimes = [], {}
    for slot in range(draw(st.integers(0, 12))):
        produced = draw(st.integers(0, n - 3))
        last = draw(st.integers(produced, n - 2))
        first = draw(st.integers(0, n - 1))
        nbytes = draw(st.integers(1, 1000))
        layout = Layout((nbytes,), (1,), 0, torch.uint8, torch.device("cpu"))
        groups.append(AliasGroup(slot, f"n{produced}", layout, (Member(f"m{slot}", layout),), nbytes))
        lifetimes[slot] = Lifetime(produced, last, first, starts[0][-1] - starts[0][last + 1] + starts[1][first])
    return Plan("toy", tuple(groups), Timeline(*starts)).with_(lifetimes=lifetimes)


def _prefix(times: list[float]) -> tuple[float, ...]:
    starts = [0.0]
    for t in times:
        starts.append(starts[-1] + t)
    return tuple(starts)


machines = st.builds(Machine, st.just(1e9), st.just(1e9), st.floats(1e3, 1e7), st.floats(1e3, 1e7), st.floats(0, 1e-3))


@given(plans(), st.integers(0, 5000), st.integers(0, 1000))
def test_selection_meets_the_budget_or_leaves_nothing_that_could_go(plan: Plan, budget: int, min_bytes: int) -> None:
    plan = select(PARTITION, plan, budget=budget, min_bytes=min_bytes)
    could_go = [g for g in plan.groups if isinstance(plan.decisions[g.slot], Keep) and g.nbytes >= min_bytes]
    assert plan.saved_bytes - plan.offloaded_bytes <= budget or not could_go
    assert all(g.nbytes >= min_bytes for g in plan.offloaded)


@given(plans(), st.integers(0, 5000))
def test_what_stays_idles_no_longer_than_what_goes(plan: Plan, budget: int) -> None:
    plan = select(PARTITION, plan, budget=budget, min_bytes=0)
    gone = [plan.lifetimes[g.slot].idle_ms for g in plan.offloaded]
    stays = [plan.lifetimes[g.slot].idle_ms for g in plan.groups if isinstance(plan.decisions[g.slot], Keep)]
    assert not gone or not stays or max(stays) <= min(gone)


@settings(max_examples=300)
@given(plans(), machines, st.integers(0, 3000))
def test_points_are_in_order_and_within_the_window(plan: Plan, machine: Machine, prefetch: int) -> None:
    assert plan.timeline is not None
    plan = plan.with_(decisions={g.slot: Offload() for g in plan.groups})
    plan = schedule(PARTITION, plan, machine=machine, prefetch=prefetch)
    last = len(plan.timeline.forward) - 3
    for group in plan.groups:
        points, life = plan.points[group.slot], plan.lifetimes[group.slot]
        assert life.produced == points.store_after <= points.release_after <= last
        assert points.release_after >= life.last_fwd_use
        assert points.load_before <= points.wait_before == life.first_bwd_use
    for position in range(len(plan.timeline.backward) - 1):
        # What is loaded at a node and has its wait at a later one: in flight while the node runs.
        ahead = [
            g for g in plan.groups if plan.points[g.slot].load_before <= position < plan.points[g.slot].wait_before
        ]
        assert sum(g.nbytes for g in ahead) <= prefetch or len(ahead) <= 1


@settings(max_examples=300)
@given(plans(), machines)
def test_releases_come_when_the_write_lane_is_done(plan: Plan, machine: Machine) -> None:
    """Replay the write lane: no release before the write ends, unless the forward ends first."""
    assert plan.timeline is not None
    plan = plan.with_(decisions={g.slot: Offload() for g in plan.groups})
    plan = schedule(PARTITION, plan, machine=machine, prefetch=1 << 30)
    starts, lane = plan.timeline.forward, 0.0
    for group in sorted(plan.groups, key=lambda g: (plan.lifetimes[g.slot].produced, g.slot)):
        point = plan.points[group.slot]
        lane = max(lane, starts[point.store_after + 1]) + 1e3 * (machine.latency_s + group.nbytes / machine.write_bw)
        assert starts[point.release_after + 1] >= lane or point.release_after == len(starts) - 3
