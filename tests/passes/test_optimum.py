"""The mixed-integer program against every plan there is, on instances small enough to try them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.simulate import Choice, Item, Step, Transfer, simulate
from tests.passes.instances import Instance, limits, random_instance
from tests.passes.optimum import Program, optimum

EXACT = 1e-6  # HiGHS's tolerance


def transfers_of(step: Step, item: Item) -> Iterator[Transfer]:
    """Every placement: the store in the forward, the load in the backward, the release anywhere between."""
    for store in range(item.produced, step.forward):
        for release in range(max(store, item.last_use), item.first_use):
            for load in range(max(release + 1, step.forward), item.first_use + 1):
                for block in (True, False):
                    yield Transfer(store, release, block, load)


def best_of_all(step: Step, machine: Machine, limit: int, share_bytes: float | None) -> float:
    """Fewest seconds of all plans that fit, infinite if none does: every choice, every placement, simulated."""
    options: list[list[tuple[Choice, Transfer | None]]] = [
        [(c, t) for c in item.choices for t in (transfers_of(step, item) if c is Choice.OFFLOAD else (None,))]
        for item in step.items
    ]
    best = math.inf
    for plan in itertools.product(*options):
        kept = sum(item.nbytes for item, (c, _) in zip(step.items, plan, strict=True) if c is Choice.KEEP and len(item.choices) > 1)
        if share_bytes is not None and kept > share_bytes:
            continue
        moved = {i: t for i, (_, t) in enumerate(plan) if t is not None}
        outcome = simulate(step, [c for c, _ in plan], moved, machine)
        if outcome.peak <= limit:
            best = min(best, outcome.seconds)
    return best
