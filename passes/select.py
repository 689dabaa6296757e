"""Keep, recompute or offload, per alias group, under a budget of memory."""

from __future__ import annotations

from typing_extensions import assert_never

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.marks import forced, prefers_offload
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.place import everything, floor
from ssd_fx.passes.plan import AliasGroup, Decision, Keep, Limits, Offload, Plan, Prediction, Recompute
from ssd_fx.passes.refine import Solution
from ssd_fx.passes.simulate import Choice, Step
from ssd_fx.passes.solve import solve
from ssd_fx.passes.step import model

Budget = int | float | str | Limits
AUTO = "auto"
AUTO_STALL = 1e-3  # the share of a step that counts as no stall
AUTO_TRIALS = 6  # of the bisection: the share is found to 1/64


def select(
    partition: Partition, plan: Plan, *, budget: Budget, min_bytes: int, machine: Machine, prefetch: int
) -> Plan:
    """Fill `plan.decisions` and `plan.prediction`.

    `budget`: a share (float from 0 to 1): that much of the bytes that can leave may stay, and memory stays as far below
    its peak with everything kept (`docs/planner.md`); bytes (int): everything that can leave leaves, and so many bytes
    may be in memory beyond what the fastest drive would leave; `"auto"`: the least share without a predicted stall.
    Groups under `min_bytes` and those with an obstacle always stay; those with a price may be recomputed. Marks are
    obeyed before all that; what only prefers to go goes unless everything may stay.
    """
    allowed = {g.slot: _allowed(plan, g, min_bytes, stay=budget == 1.0) for g in plan.groups}
    modelled = model(partition, plan, allowed)
    step = modelled.step
    solution, at = _solve(step, budget, machine, prefetch)
    chosen = dict(zip(modelled.slots, solution.choices, strict=True))
    decisions = {g.slot: _decision(plan, g, chosen.get(g.slot), min_bytes) for g in plan.groups}
    prediction = Prediction(modelled, solution, at, floor(step), everything(step))
    return plan.with_(decisions=decisions, prediction=prediction)


def _allowed(plan: Plan, group: AliasGroup, min_bytes: int, *, stay: bool) -> frozenset[Choice]:
    match forced(plan, group, min_bytes):
        case Keep():
            return frozenset({Choice.KEEP})
        case Offload():
            return frozenset({Choice.OFFLOAD})
    if _reason(group, min_bytes):
        return frozenset({Choice.KEEP})
    if prefers_offload(plan, group) and not stay:
        return frozenset({Choice.OFFLOAD})
    both = {Choice.KEEP, Choice.OFFLOAD}
    return frozenset(both | {Choice.RECOMPUTE} if group.slot in plan.prices else both)


def _decision(plan: Plan, group: AliasGroup, chosen: Choice | None, min_bytes: int) -> Decision:
    match chosen:
        case None | Choice.KEEP:
            return forced(plan, group, min_bytes) or Keep(_reason(group, min_bytes) or "within the budget")
        case Choice.OFFLOAD:
            return Offload()
        case Choice.RECOMPUTE:
            return Recompute(plan.prices[group.slot].nodes)
    assert_never(chosen)


def _solve(step: Step, budget: Budget, machine: Machine, prefetch: int) -> tuple[Solution, Limits]:
    if budget == AUTO:
        return _auto(step, machine, prefetch)
    at = budget if isinstance(budget, Limits) else limits(step, budget)
    return solve(step, machine, limit=at.memory, share_bytes=at.kept, prefetch=prefetch), at


def limits(step: Step, budget: int | float | str) -> Limits:
    """What a share of the step's own range or a number of bytes beyond its floor allows."""
    least = floor(step)
    if isinstance(budget, float):
        movable = sum(item.nbytes for item in step.items if item.choices != {Choice.KEEP})
        return Limits(least + budget * (everything(step) - least), budget * movable)
    return Limits(least + int(budget), 0)


def _auto(step: Step, machine: Machine, prefetch: int) -> tuple[Solution, Limits]:
    """By bisection: less memory never makes for less stall."""
    low, high = 0.0, 1.0
    best = _solve(step, high, machine, prefetch)
    for _ in range(AUTO_TRIALS):
        middle = (low + high) / 2
        found = _solve(step, middle, machine, prefetch)
        if found[0].outcome.stall_s <= AUTO_STALL * found[0].outcome.seconds:
            best, high = found, middle
        else:
            low = middle
    return best


def _reason(group: AliasGroup, min_bytes: int) -> str:
    return group.obstacle or ("below min_bytes" if group.nbytes < min_bytes else "")
