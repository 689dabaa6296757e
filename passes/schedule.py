"""Where the store, release, load and wait of every offloaded group go.

    forward    base [store]  ...last use...  (write predicted done) [release]
    backward   [load]  ...read predicted to take this long...  [wait] first use

A release earlier than its write is legal (the runtime then holds the tensor); it is put where the write is predicted
to be done so that memory is really gone there. Loads are issued as late as the read lane allows, with a margin, and
never so early that more than `prefetch` bytes wait for their use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import AliasGroup, Plan, Points

# Loads start this many times their predicted duration before they are due: the roofline is coarse, and a load that is
# early costs some memory within the `prefetch` window while one that is late costs a stall.
LOAD_MARGIN = 2.0


def schedule(partition: Partition, plan: Plan, *, machine: Machine, prefetch: int) -> Plan:
    """Fill `plan.points` for every offloaded group. `prefetch` is in bytes."""
    releases = _releases(plan, machine)
    loads = _loads(plan, machine, prefetch)
    points = {
        g.slot: Points(
            store_after=plan.lifetimes[g.slot].produced,
            release_after=releases[g.slot],
            load_before=loads[g.slot],
            wait_before=plan.lifetimes[g.slot].first_bwd_use,
        )
        for g in plan.offloaded
    }
    return plan.with_(points=points)


def _releases(plan: Plan, machine: Machine) -> dict[int, int]:
    """First position behind the last forward use at which the write lane is predicted to have written the group."""
    assert plan.timeline is not None
    starts = plan.timeline.forward
    last = len(starts) - 3  # the node before the output
    lane_free, releases = 0.0, {}
    for group in sorted(plan.offloaded, key=lambda g: plan.lifetimes[g.slot].produced):
        life = plan.lifetimes[group.slot]
        ready = starts[life.produced + 1]
        lane_free = max(lane_free, ready) + 1e3 * (machine.latency_s + group.stored_nbytes / machine.write_bw)
        written = bisect_left(starts, lane_free) - 1  # the node that is predicted to end at or after that moment
        releases[group.slot] = min(max(life.last_fwd_use, written), last)
    return releases


def _loads(plan: Plan, machine: Machine, prefetch: int) -> dict[int, int]:
    """Latest starts on one read lane, latest deadline first; then none earlier than the window allows."""
    assert plan.timeline is not None
    starts = plan.timeline.backward
    by_deadline = sorted(plan.offloaded, key=lambda g: (plan.lifetimes[g.slot].first_bwd_use, g.slot))
    lane, wanted = float("inf"), {}
    for group in reversed(by_deadline):
        due = plan.lifetimes[group.slot].first_bwd_use
        lane = min(lane, starts[due]) - 1e3 * LOAD_MARGIN * (machine.latency_s + group.stored_nbytes / machine.read_bw)
        wanted[group.slot] = min(max(bisect_right(starts, lane) - 1, plan.timeline.backward_begin), due)
    return _within_window(plan, by_deadline, wanted, prefetch)


def _within_window(plan: Plan, by_deadline: list[AliasGroup], wanted: dict[int, int], prefetch: int) -> dict[int, int]:
    """Delay loads until earlier ones have been waited for, so that at most `prefetch` bytes wait; one always may."""
    loads, outstanding, oldest, earliest = {}, 0, 0, 0
    for i, group in enumerate(by_deadline):
        outstanding += group.stored_nbytes
        while outstanding > prefetch and oldest < i:
            outstanding -= by_deadline[oldest].stored_nbytes
            earliest = plan.lifetimes[by_deadline[oldest].slot].first_bwd_use
            oldest += 1
        loads[group.slot] = max(wanted[group.slot], earliest)
    return loads
