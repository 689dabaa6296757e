"""Keep, recompute or offload, per alias group, under a budget of memory; and the points of what is offloaded.

forward    base [store]  ...last use... [release]
backward   [load] ... [wait] first use
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import replace

import numpy as np
from typing_extensions import assert_never

from ssd_fx.passes.cost.machine import Machine, dtype_name
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint.marks import forced, prefers_offload
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Decision, Forecast, Keep, Limits, Offload, Plan, Points, Recompute
from ssd_fx.passes.planner.budget import Budget, solve_for
from ssd_fx.passes.planner.course import course, stock
from ssd_fx.passes.planner.items import Choice, Transfer
from ssd_fx.passes.planner.place import everything, floor, free_bytes
from ssd_fx.passes.planner.solution import Solution, kept_bytes
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.planner.step import Modelled, computed_again, model

LISTED = 3  # groups that an error names


def select(
    partition: Partition,
    plan: Plan,
    *,
    options: PlanOptions,
    machine: Machine,
    budget: Budget,
    host_tier: bool,
    quick: bool,
) -> Plan:
    """Fill `plan.decisions`, `plan.points` and `plan.forecast`.

    `budget`: a share, bytes, 0 or "auto" (`planner/budget.py`), or limits. Groups under `options.min_bytes` and those
    with an obstacle are kept. Those with a price may be recomputed. Marks come before all that. A group that only
    prefers to be offloaded is offloaded, unless everything may stay.

    `host_tier`: the device has other memory than the host, so groups may go there instead of to the drive. If not, the
    host budget is for tensors that the runtime keeps resident. `quick`: see `solve`.

    Raises:
        BudgetError: a budget in bytes, other than 0, is less than what always stays.
    """
    min_bytes = options.min_bytes
    host_budget = options.host_budget if host_tier else 0
    shrinks = {} if host_budget else dict(options.shrinks)  # the search chooses the tier, and so the codec
    if isinstance(budget, int) and budget:
        _check_room(plan, budget, min_bytes)
    # `budget` may be the limits of an earlier plan. The options say what the user wants.
    keep_all = isinstance(options.budget, float) and options.budget == 1.0
    allowed = {g.slot: _allowed(plan, g, min_bytes, keep_all=keep_all) for g in plan.groups}
    modelled = _with_host(_compressed(model(partition, plan, allowed), plan, shrinks), plan, host_budget)
    solution, at = solve_for(
        modelled.step,
        budget,
        machine,
        options.prefetch,
        quick=quick,
        slowdown=options.slowdown,
        whole=options.spare and partition.is_whole_step,
    )
    copied = _copied(solution, options) if host_tier else set()
    later = _later(plan, modelled, solution, options, copied)
    chosen = dict(zip(modelled.slots, solution.choices, strict=True))
    in_order = _in_order(modelled.step.forward, solution) if options.copies_only and host_tier else solution.transfers
    transfers = {modelled.slots[i]: t for i, t in in_order.items()}
    tiers = {slot: t.tier for slot, t in transfers.items()} if host_budget else {}
    host_speedup = machine.lanes("host").write_bw / machine.write_bw if host_tier and not options.host_budget else 0.0
    gone = {g.slot: Offload(tiers.get(g.slot, ""), _binds(plan, g)) for g in plan.groups}
    return plan.with_(
        decisions={g.slot: _decision(plan, g, chosen.get(g.slot), min_bytes, gone[g.slot]) for g in plan.groups},
        points={slot: _points(plan, modelled, slot, transfer, slot in later) for slot, transfer in transfers.items()},
        forecast=_forecast(plan, modelled, solution, at, options, host_speedup),
        course=course(plan, modelled, solution, machine, later),
        stock=plan.stock if plan.recomputed else stock(plan, modelled),
    )


def over(partition: Partition, plan: Plan, limit: float, options: PlanOptions) -> frozenset[str]:
    """Names of what the backward computes again by our choice, and has in memory where that is over a limit in bytes
    whatever leaves memory."""
    allowed = {g.slot: _allowed(plan, g, options.min_bytes, keep_all=False) for g in plan.groups}
    modelled = model(partition, plan, allowed)
    gone = [Choice.KEEP if item.choices == {Choice.KEEP} else Choice.OFFLOAD for item in modelled.step.items]
    free = free_bytes(modelled.step, gone, limit)
    return computed_again(partition, [(modelled.begins[p], modelled.ends[p]) for p in np.flatnonzero(free < 0)])


def _copied(found: Solution, options: PlanOptions) -> set[int]:
    """The items of a device that are copied to host memory, in a stream."""
    return {i for i, transfer in found.transfers.items() if options.copies_only or transfer.tier == "host"}


def _later(plan: Plan, modelled: Modelled, found: Solution, options: PlanOptions, copied: Set[int]) -> set[int]:
    """The slots of what would be copied to host memory in vain: its load comes before the copy has ended.

    Its memory is never free within the step. A copy in a stream cannot be cut short, as a write to a drive can. So it
    begins only if another forward comes before the backward. A mark that binds is obeyed at once. Floats under a lossy
    codec are encoded at once, lest their bits depend on other forwards.
    """
    groups = {g.slot: g for g in plan.groups}
    later = set()
    for i in copied & found.outcome.forwarded:
        slot = modelled.slots[i]
        lossy = options.lossy and groups[slot].stored.dtype.is_floating_point
        if not lossy and Choice.KEEP in modelled.step.items[i].choices:
            later.add(slot)
    return later


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
    """Whether a mark offloads the group. One to host memory does not bind a tensor of the CPU, which is there."""
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
    both = {Choice.KEEP, Choice.OFFLOAD}
    return frozenset(both | {Choice.RECOMPUTE} if group.slot in plan.prices else both)


def _compressed(modelled: Modelled, plan: Plan, shrinks: Mapping[str, float]) -> Modelled:
    """With the bytes that are written of the items, where compression makes fewer of their dtype."""
    if not shrinks:
        return modelled
    dtypes = {g.slot: dtype_name(g.layout.dtype) for g in plan.groups if g.layout}
    shares = [shrinks.get(dtypes.get(slot, ""), 1.0) for slot in modelled.slots]
    pairs = zip(modelled.step.items, shares, strict=True)
    items = tuple(replace(item, stored_nbytes=math.ceil(share * item.moved_nbytes)) for item, share in pairs)
    return replace(modelled, step=replace(modelled.step, items=items))


def _with_host(modelled: Modelled, plan: Plan, host_budget: int) -> Modelled:
    """With the budget of host memory, and the tiers that marks name. A tensor of the CPU can only go to the drive."""
    if not host_budget:
        return modelled
    groups, items = {g.slot: g for g in plan.groups}, []
    for slot, item in zip(modelled.slots, modelled.step.items, strict=True):
        layout, mark = groups[slot].layout, plan.marks.get(slot)
        if layout is not None and layout.device.type == "cpu":
            items.append(replace(item, tier="ssd"))
        else:
            items.append(replace(item, tier=(mark.tier if mark else "") or None))
    return replace(modelled, step=replace(modelled.step, items=tuple(items), host_budget=host_budget))


def _decision(plan: Plan, group: AliasGroup, chosen: Choice | None, min_bytes: int, gone: Offload) -> Decision:
    match chosen:
        case None | Choice.KEEP:
            return Keep(_stays(plan, group, min_bytes) or "within the budget")
        case Choice.OFFLOAD:
            return gone
        case Choice.RECOMPUTE:
            return Recompute(plan.prices[group.slot].nodes)
    assert_never(chosen)


def _in_order(forward: int, found: Solution) -> dict[int, Transfer]:
    """The transfers, with their releases where the copies are to have ended, in the `forward` first operators.

    A device's memory goes back in the order of its stream, which waits there for a copy that is late. The host runs far
    ahead: without such a release it would find most copies under way, and hold their tensors. This is for copies only,
    which nobody but the stream waits for. The host would wait for a drive.
    """
    outcome, made = found.outcome, dict(found.transfers)
    for i, transfer in found.transfers.items():
        ended = bisect_left(outcome.starts, outcome.write_ends[i]) - 1
        if i not in outcome.forwarded and not transfer.block and ended < forward:
            made[i] = replace(transfer, release_after=max(transfer.release_after, ended), block=True)
    return made


def _points(plan: Plan, modelled: Modelled, slot: int, transfer: Transfer, later: bool) -> Points:
    """From operators of the simulated step to nodes of the graphs."""
    assert plan.timeline is not None
    begins, ends = modelled.begins, modelled.ends
    output = len(plan.timeline.forward) - 2  # the timeline has one entry more than the forward has nodes
    last = output - 1
    return Points(
        store_after=min(ends[transfer.store_after], last),
        release_after=min(ends[transfer.release_after], last),
        load_before=begins[transfer.load_before],
        wait_before=plan.lifetimes[slot].first_bwd_use,
        block=transfer.block,
        strict=transfer.strict,
        later=later,
    )


def _forecast(
    plan: Plan,
    modelled: Modelled,
    solution: Solution,
    at: Limits,
    options: PlanOptions,
    host_speedup: float,
) -> Forecast:
    step, outcome = modelled.step, solution.outcome
    assert plan.timeline is not None
    peak = outcome.memory.index(outcome.peak)
    before = 0 if peak < step.forward else len(plan.timeline.forward) - 1
    return Forecast(
        seconds=outcome.seconds,
        compute_s=sum(step.seconds),
        write_stall_s=outcome.write_stall_s,
        read_stall_s=outcome.read_stall_s,
        peak=outcome.peak,
        peak_node=before + modelled.begins[peak],
        kept=kept_bytes(step, solution.choices),
        written=outcome.written,
        limits=at,
        floor=floor(step),
        everything=everything(step),
        host_peak=outcome.host_peak,
        host_budget=step.host_budget,
        resident=options.host_budget - step.host_budget,  # all of it where host memory is no tier
        shared=options.budget if isinstance(options.budget, int) else 0,
        host_speedup=host_speedup,
    )
