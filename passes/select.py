"""Keep or offload, per alias group, under a budget of memory."""

from __future__ import annotations

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.place import everything, floor
from ssd_fx.passes.plan import AliasGroup, Decision, Keep, Offload, Plan, Prediction
from ssd_fx.passes.refine import Solution
from ssd_fx.passes.simulate import Choice, Step
from ssd_fx.passes.solve import solve
from ssd_fx.passes.step import model

AUTO = "auto"
AUTO_STALL = 1e-3  # the share of a step that counts as no stall
AUTO_TRIALS = 6  # of the bisection: the share is found to 1/64

_MAY = {True: frozenset({Choice.KEEP}), False: frozenset({Choice.KEEP, Choice.OFFLOAD})}


def select(
    partition: Partition, plan: Plan, *, budget: int | float | str, min_bytes: int, machine: Machine, prefetch: int
) -> Plan:
    """Fill `plan.decisions` and `plan.prediction`.

    `budget`: a share (float from 0 to 1): that much of the bytes that can leave may stay, and memory stays as far below
    its peak with everything kept (`docs/planner.md`); bytes (int): everything that can leave leaves, and so many bytes
    may be in memory beyond what the fastest drive would leave; `"auto"`: the least share without a predicted stall.
    Groups under `min_bytes` and those with an obstacle always stay.
    """
    reasons = {g.slot: _reason(g, min_bytes) for g in plan.groups}
    modelled = model(partition, plan, {slot: _MAY[bool(reason)] for slot, reason in reasons.items()})
    step = modelled.step
    solution, limit = _solve(step, budget, machine, prefetch)
    chosen = dict(zip(modelled.slots, solution.choices, strict=True))
    decisions: dict[int, Decision] = {
        g.slot: Offload() if chosen.get(g.slot) is Choice.OFFLOAD else Keep(reasons[g.slot] or "within the budget")
        for g in plan.groups
    }
    prediction = Prediction(modelled, solution, limit, floor(step), everything(step))
    return plan.with_(decisions=decisions, prediction=prediction)


def _solve(step: Step, budget: int | float | str, machine: Machine, prefetch: int) -> tuple[Solution, float]:
    if budget == AUTO:
        return _auto(step, machine, prefetch)
    if isinstance(budget, float):
        return _share(step, budget, machine, prefetch)
    limit = floor(step) + int(budget)
    return solve(step, machine, limit=limit, share_bytes=0, prefetch=prefetch), limit


def _share(step: Step, share: float, machine: Machine, prefetch: int) -> tuple[Solution, float]:
    least = floor(step)
    limit = least + share * (everything(step) - least)
    movable = sum(item.nbytes for item in step.items)
    return solve(step, machine, limit=limit, share_bytes=share * movable, prefetch=prefetch), limit


def _auto(step: Step, machine: Machine, prefetch: int) -> tuple[Solution, float]:
    """By bisection: less memory never makes for less stall."""
    low, high = 0.0, 1.0
    best = _share(step, high, machine, prefetch)
    for _ in range(AUTO_TRIALS):
        middle = (low + high) / 2
        found = _share(step, middle, machine, prefetch)
        if found[0].outcome.stall_s <= AUTO_STALL * found[0].outcome.seconds:
            best, high = found, middle
        else:
            low = middle
    return best


def _reason(group: AliasGroup, min_bytes: int) -> str:
    return group.obstacle or ("below min_bytes" if group.nbytes < min_bytes else "")
