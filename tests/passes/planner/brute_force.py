"""Every plan of a tiny training step, simulated: the best there is."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from ssd_fx.passes.axis import Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.budget import HEADROOM
from ssd_fx.passes.planner.compare import fits
from ssd_fx.passes.planner.replay import first_uses, replay
from ssd_fx.passes.schedule import Schedule, Trip

SLOWDOWN = 0.01
TINY = ((2, 3), (5, 6))  # items and operators, few enough to try every plan


def trips_of(step: Step, i: int, item: Item, first: int) -> Iterator[Trip]:
    """Every placement: store and release behind operators of the forward, the load before one of the backward up to
    `first`."""
    for store in range(item.produced, step.forward):
        for release in range(max(store, item.last_use), step.forward):
            for load in range(step.forward, first + 1):
                for block in (True, False):
                    yield Trip.of(i, store, release, load, first, block=block)


@functools.cache
def best_of_all(step: Step, machine: Machine, limit: float, share_bytes: float | None) -> float:
    """Fewest seconds of all plans that fit, infinite if none does: every choice, every placement, simulated."""
    best = math.inf
    for choices in itertools.product(*(item.choices for item in step.items)):
        if share_bytes is not None and step.kept_bytes(choices) > share_bytes:
            continue
        firsts = first_uses(step, choices)
        moved = [i for i, choice in enumerate(choices) if choice is Choice.OFFLOAD]
        for placed in itertools.product(*(trips_of(step, i, step.items[i], firsts[i]) for i in moved)):
            found = replay(step, choices, Schedule(placed, step.items), machine)
            if fits(found, limit):
                best = min(best, found.seconds)
    return best


def all_kept_s(step: Step, machine: Machine) -> float:
    """The seconds of the step with everything kept."""
    return replay(step, [Choice.KEEP] * len(step.items), Schedule(), machine).seconds


def least_that_is_cheap(step: Step, machine: Machine) -> float:
    """The least share of all plans that take hardly longer than with everything kept, and recompute nothing."""
    least, most = step.floor, step.everything
    movable = sum(item.nbytes for item in step.items)
    options = [
        [(Choice.KEEP, None), *((Choice.OFFLOAD, t) for t in trips_of(step, i, item, item.first_use))]
        for i, item in enumerate(step.items)
    ]
    shares = [1.0]
    for plan in itertools.product(*options):
        found = replay(step, [c for c, _ in plan], Schedule([t for _, t in plan if t], step.items), machine)
        if not found.idle_lane and found.seconds <= (1 + SLOWDOWN) * all_kept_s(step, machine):
            kept = sum(item.nbytes for item, (c, _) in zip(step.items, plan, strict=True) if c is Choice.KEEP)
            above = found.peak - least if found.peak > HEADROOM * least else 0
            shares.append(max(above / max(most - least, 1), kept / movable))
    return min(shares)
