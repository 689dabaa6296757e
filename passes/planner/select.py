"""Decides to keep, recompute or offload each alias group under a budget of memory, and makes the schedule.

forward    base [store]  ...last use... [release]
backward   [load] ... [wait] first use
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from typing_extensions import assert_never

from ssd_fx.passes.axis import CHOICES, Choice, Step
from ssd_fx.passes.cost.machine import Machine, dtype_name
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint.marks import forced, prefers_offload
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Decision, Keep, Offload, Plan, Recompute, replay_of
from ssd_fx.passes.planner.budget import AUTO, Budget, solve_for
from ssd_fx.passes.planner.freed_by_copies import begin_later, gone_by, in_order
from ssd_fx.passes.planner.off_plan import held_to_its_limit
from ssd_fx.passes.planner.place import free_bytes
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.planner.step import computed_again, model
from ssd_fx.passes.schedule import EMPTY, Schedule, Trip

LISTED = 3  # groups that an error names


def select(
    partition: Partition,
    plan: Plan,
    *,
    options: PlanOptions,
    machine: Machine,
    budget: Budget,
    quick: bool,
) -> Plan:
    """Fill `plan.decisions`, `plan.schedule`, `plan.gone_by`, `plan.limits`, `plan.replay` and `plan.baseline`.

    `budget`: a share, bytes, 0 or "auto" (`planner/budget.py`), or limits. Groups under `options.min_bytes` and those
    with an obstacle are kept. Those with a price may be recomputed. Marks come before all that. A group that only
    prefers to be offloaded is offloaded, unless everything may stay.

    Where the device has no host tier, the host budget is for tensors that the runtime keeps resident. `quick`: see
    `solve`.

    Raises:
        BudgetError: a budget in bytes, other than 0, is less than the bytes that always stay.
    """
    min_bytes, host_tier = options.min_bytes, partition.has_host_tier
    host_budget = options.host_budget if host_tier else 0
    if isinstance(budget, int) and budget:
        _check_room(plan, budget, min_bytes)
    # `budget` may be the limits of an earlier plan. The options say what the user wants.
    keep_all = isinstance(options.budget, float) and options.budget == 1.0
    allowed = {g.slot: _allowed(plan, g, min_bytes, keep_all=keep_all) for g in plan.groups}
    step = _moved(model(partition, plan, allowed), plan, options, host_budget)
    found, at = solve_for(
        step,
        budget,
        machine,
        options.prefetch,
        quick=quick,
        slowdown=options.slowdown,
        whole=options.spare and partition.is_whole_step,
    )
    if options.budget != AUTO:
        found = held_to_its_limit(found, at.memory, machine, late=partition.is_whole_step)
    schedule = in_order(found) if options.copies_only and host_tier else found.schedule
    nodes = _of_nodes(plan, step, schedule, begin_later(plan, found, options) if host_tier else ())
    chosen = dict(zip(step.slots, found.choices, strict=True))
    tiers = {step.slots[i]: trip.tier for i, trip in schedule.items()} if host_budget else {}
    gone = {g.slot: Offload(tiers.get(g.slot, ""), _binds(plan, g)) for g in plan.groups}
    return plan.with_(
        decisions={g.slot: _decision(plan, g, chosen.get(g.slot), min_bytes, gone[g.slot]) for g in plan.groups},
        schedule=nodes,
        gone_by=gone_by(found, nodes, at.memory) if host_tier else {},
        limits=replace(
            at,
            resident=options.host_budget - host_budget,  # all of the host budget where host memory is no tier
            shared=options.budget if isinstance(options.budget, int) else 0,
        ),
        replay=found,
        baseline=replay(step, (Choice.KEEP,) * len(step.items), EMPTY, machine),
    )


def with_nodes(partition: Partition, plan: Plan) -> Plan:
    """The plan with the bytes that are alive once our nodes stand in the graphs, where they cut C++ functions.

    These are never more than the search counted, which did not know yet where our nodes would stand.
    """
    found = replay_of(plan)
    choices = dict.fromkeys(plan.items, frozenset({Choice.KEEP}))
    choices |= {slot: item.choices for slot, item in zip(found.step.slots, found.step.items, strict=True)}
    step = replace(found.step, base=model(partition, plan, choices, plan.schedule).base)
    alive = zip(found.memory, found.step.base, step.base, strict=True)
    return plan.with_(replay=replace(found, step=step, memory=tuple(m - before + now for m, before, now in alive)))


def over(partition: Partition, plan: Plan, limit: float, options: PlanOptions) -> frozenset[str]:
    """Names of the nodes that the backward computes again by our choice, and that are in memory at a place over the
    limit. A place is over the limit if the bytes alive exceed it though everything has left that can leave."""
    allowed = {g.slot: _allowed(plan, g, options.min_bytes, keep_all=False) for g in plan.groups}
    step = model(partition, plan, allowed)
    gone = [Choice.KEEP if item.choices == {Choice.KEEP} else Choice.OFFLOAD for item in step.items]
    return computed_again(partition, [step.nodes[p] for p in np.flatnonzero(free_bytes(step, gone, limit) < 0)])


def _check_room(plan: Plan, budget: int, min_bytes: int) -> None:
    """Check that the tensors of this graph that must be kept are within a budget in bytes.

    Raises:
        BudgetError: they are not.
    """
    stay = {g: reason for g in plan.groups if (reason := _stays(plan, g, min_bytes))}
    least = sum(g.nbytes for g in stay)
    if least <= budget:
        return
    largest = sorted(stay, key=lambda g: -g.nbytes)
    listed = [f"{g.base!r} ({g.nbytes} B, {stay[g]})" for g in largest[:LISTED]]
    if len(stay) > LISTED:
        listed.append(f"{len(stay) - LISTED} more ({sum(g.nbytes for g in largest[LISTED:])} B)")
    why = f", because these must stay in memory in graph {plan.graph}: {', '.join(listed)}"
    raise BudgetError(budget, least, f"{why}; right would be a larger budget, fewer marks or a smaller min_bytes")


def _stays(plan: Plan, group: AliasGroup, min_bytes: int) -> str:
    """Why a group is kept whatever the budget; empty where it can be offloaded."""
    match forced(plan, group, min_bytes):
        case Keep(reason=reason):
            return reason
        case Offload():
            return ""
    return group.obstacle or ("below min_bytes" if group.nbytes < min_bytes else "")


def _binds(plan: Plan, group: AliasGroup) -> bool:
    """Whether a mark offloads the group. A mark for host memory binds no tensor of the CPU: it is in host memory."""
    mark = plan.marks.get(group.slot)
    if mark is None or mark.decision != "offload":
        return False
    return mark.tier != "host" or (group.layout is not None and group.layout.device.type != "cpu")


def _allowed(plan: Plan, group: AliasGroup, min_bytes: int, *, keep_all: bool) -> frozenset[Choice]:
    if _stays(plan, group, min_bytes):
        return frozenset({Choice.KEEP})
    if isinstance(forced(plan, group, min_bytes), Offload):
        return frozenset({Choice.OFFLOAD})
    if prefers_offload(plan, group) and not keep_all:
        return frozenset({Choice.OFFLOAD})
    return CHOICES if group.slot in plan.prices else CHOICES - {Choice.RECOMPUTE}


def _moved(step: Step, plan: Plan, options: PlanOptions, host_budget: int) -> Step:
    """The step with the tiers that its items must go to, or with the bytes that compression leaves of them.

    If there is a budget of host memory, a tensor of the CPU goes to the drive, and marks name the tiers of others. The
    search chooses the remaining tiers. The codec depends on the tier, so it is not known here. Without such a budget,
    fewer bytes are written of the dtypes that compression makes smaller.
    """
    groups, shrinks, items = {g.slot: g for g in plan.groups}, dict(options.shrinks), []
    for slot, item in zip(step.slots, step.items, strict=True):
        layout, mark = groups[slot].layout, plan.marks.get(slot)
        if host_budget:
            is_host = layout is not None and layout.device.type == "cpu"
            item = replace(item, tier="ssd" if is_host else (mark.tier if mark else "") or None)
        elif layout is not None and dtype_name(layout.dtype) in shrinks:
            share = shrinks[dtype_name(layout.dtype)]
            item = replace(item, stored_nbytes=math.ceil(share * item.moved_nbytes))
        items.append(item)
    return replace(step, items=tuple(items), host_budget=host_budget)


def _decision(plan: Plan, group: AliasGroup, chosen: Choice | None, min_bytes: int, gone: Offload) -> Decision:
    match chosen:
        case None | Choice.KEEP:
            return Keep(_stays(plan, group, min_bytes) or "within the budget")
        case Choice.OFFLOAD | Choice.DEFER:
            return gone
        case Choice.RECOMPUTE:
            return Recompute(plan.prices[group.slot].nodes)
    assert_never(chosen)


def _of_nodes(plan: Plan, step: Step, schedule: Schedule, later: Collection[int]) -> Schedule:
    """The schedule on the axis of nodes. `later`: the slots whose writes begin only with another forward."""
    assert plan.node_ms is not None
    last = len(plan.node_ms[0]) - 3  # the node before the output; the times have the end as well
    trips = []
    for i, found in schedule.items():
        slot = step.slots[i]
        trip = Trip.of(
            slot,
            store=min(step.nodes[found.store.at][1], last),
            release=min(step.nodes[found.release.at][1], last),
            load=step.nodes[found.load.at][0],
            wait=plan.items[slot].first_use,
            later=slot in later,
            block=found.blocks,
            strict=found.is_strict,
            tier=found.tier,
        )
        trips.append(trip)
    return Schedule(trips, plan.items)
