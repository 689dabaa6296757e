"""Every plan of a tiny training step, simulated: the best there is."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.budget import HEADROOM
from ssd_fx.passes.planner.items import Choice, Item, Step, Transfer
from ssd_fx.passes.planner.place import everything, floor
from ssd_fx.passes.planner.simulate import simulate
from ssd_fx.passes.planner.solution import fits

SLOWDOWN = 0.01
TINY = ((2, 3), (5, 6))  # items and operators, few enough to try every plan


def transfers_of(step: Step, item: Item) -> Iterator[Transfer]:
    """Every placement: store and release behind operators of the forward, the load before one of the backward."""
    for store in range(item.produced, step.forward):
        for release in range(max(store, item.last_use), step.forward):
            for load in range(step.forward, item.first_use + 1):
                for block in (True, False):
                    yield Transfer(store, release, block, load)


@functools.cache
def best_of_all(step: Step, machine: Machine, limit: float, share_bytes: float | None) -> float:
    """Fewest seconds of all plans that fit, infinite if none does: every choice, every placement, simulated."""
    options: list[list[tuple[Choice, Transfer | None]]] = [
        [(c, t) for c in item.choices for t in (transfers_of(step, item) if c is Choice.OFFLOAD else (None,))]
        for item in step.items
    ]
    may_leave = [item.nbytes if len(item.choices) > 1 else 0 for item in step.items]
    best = math.inf
    for plan in itertools.product(*options):
        kept = sum(nbytes for nbytes, (c, _) in zip(may_leave, plan, strict=True) if c is Choice.KEEP)
        if share_bytes is not None and kept > share_bytes:
            continue
        moved = {i: t for i, (_, t) in enumerate(plan) if t is not None}
        outcome = simulate(step, [c for c, _ in plan], moved, machine)
        if fits(step, outcome, limit):
            best = min(best, outcome.seconds)
    return best


def all_kept_s(step: Step, machine: Machine) -> float:
    """The seconds of the step with everything kept."""
    return simulate(step, [Choice.KEEP] * len(step.items), {}, machine).seconds


def least_that_is_cheap(step: Step, machine: Machine) -> float:
    """The least share of all plans that take hardly longer than with everything kept, and recompute nothing."""
    least, most = floor(step), everything(step)
    movable = sum(item.nbytes for item in step.items)
    options = [[(Choice.KEEP, None), *((Choice.OFFLOAD, t) for t in transfers_of(step, item))] for item in step.items]
    shares = [1.0]
    for plan in itertools.product(*options):
        outcome = simulate(step, [c for c, _ in plan], {i: t for i, (_, t) in enumerate(plan) if t}, machine)
        if not outcome.idle_lane and outcome.seconds <= (1 + SLOWDOWN) * all_kept_s(step, machine):
            kept = sum(item.nbytes for item, (c, _) in zip(step.items, plan, strict=True) if c is Choice.KEEP)
            above = outcome.peak - least if outcome.peak > HEADROOM * least else 0
            shares.append(max(above / max(most - least, 1), kept / movable))
    return min(shares)
