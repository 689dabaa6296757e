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
from ssd_fx.passes.planner.simulate import first_uses, simulate
from ssd_fx.passes.planner.solution import fits, kept_bytes

SLOWDOWN = 0.01
TINY = ((2, 3), (5, 6))  # items and operators, few enough to try every plan


def transfers_of(step: Step, item: Item, first: int) -> Iterator[Transfer]:
    """Every placement: store and release behind operators of the forward, the load before one of the backward up to
    `first`."""
    for store in range(item.produced, step.forward):
        for release in range(max(store, item.last_use), step.forward):
            for load in range(step.forward, first + 1):
                for block in (True, False):
                    yield Transfer(store, release, block, load)


@functools.cache
def best_of_all(step: Step, machine: Machine, limit: float, share_bytes: float | None) -> float:
    """Fewest seconds of all plans that fit, infinite if none does: every choice, every placement, simulated."""
    best = math.inf
    for choices in itertools.product(*(item.choices for item in step.items)):
        if share_bytes is not None and kept_bytes(step, choices) > share_bytes:
            continue
        firsts = first_uses(step, choices)
        moved = [i for i, choice in enumerate(choices) if choice is Choice.OFFLOAD]
        for placed in itertools.product(*(transfers_of(step, step.items[i], firsts[i]) for i in moved)):
            outcome = simulate(step, choices, dict(zip(moved, placed, strict=True)), machine)
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
    options = [
        [(Choice.KEEP, None), *((Choice.OFFLOAD, t) for t in transfers_of(step, item, item.first_use))]
        for item in step.items
    ]
    shares = [1.0]
    for plan in itertools.product(*options):
        outcome = simulate(step, [c for c, _ in plan], {i: t for i, (_, t) in enumerate(plan) if t}, machine)
        if not outcome.idle_lane and outcome.seconds <= (1 + SLOWDOWN) * all_kept_s(step, machine):
            kept = sum(item.nbytes for item, (c, _) in zip(step.items, plan, strict=True) if c is Choice.KEEP)
            above = outcome.peak - least if outcome.peak > HEADROOM * least else 0
            shares.append(max(above / max(most - least, 1), kept / movable))
    return min(shares)
