"""Where layers meet: the places in the forward that few bytes of saved tensors are needed across.

    x0 -> [norm, qkv, attention, proj] -> x1 -> [norm, up, gelu, down] -> x2
        |                                |                              |       few bytes: x0, x1, x2

A checkpoint per layer saves what is needed across such places, and recomputes all else. They are found by bytes alone,
without names of modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ssd_fx.passes.planner.items import Step

NARROW = 2  # between two boundaries the bytes rise to this factor of theirs at least


def boundaries(step: Step) -> list[frozenset[int]]:
    """The items that are needed across each boundary, in the order of the forward."""
    reach = _reach(step)
    change = [0] * (step.forward + 1)
    for item, last in zip(step.items, reach, strict=True):
        change[item.produced] += item.nbytes
        change[last] -= item.nbytes
    widths = list(itertools.accumulate(change[: step.forward]))
    return [_across(step, reach, at) for at in _valleys(widths) if widths[at]]


def _reach(step: Step) -> list[int]:
    """The last operator of the forward that needs every item: reads it, or makes what is recomputed from it."""
    reach = [item.last_use for item in step.items]
    for item in step.items:
        for needed in item.needs:
            reach[needed] = max(reach[needed], item.produced)
    return reach


def _across(step: Step, reach: Sequence[int], at: int) -> frozenset[int]:
    return frozenset(i for i, item in enumerate(step.items) if item.produced <= at < reach[i])


def _valleys(widths: Sequence[int]) -> list[int]:
    """The lowest places that have higher ones, by the factor `NARROW`, on either side."""
    found: list[int] = []
    lowest: int | None = None  # the lowest place since it was high
    top = 0
    for at, width in enumerate(widths):
        if lowest is not None and width < widths[lowest]:
            lowest = at
        elif lowest is not None and width >= NARROW * widths[lowest]:
            found.append(lowest)
            lowest, top = None, width
        elif lowest is None and NARROW * width <= top:
            lowest = at
        else:
            top = max(top, width)
    return found
