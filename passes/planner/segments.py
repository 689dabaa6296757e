"""Where layers meet, by the bytes of saved tensors that are needed across (`joint/layers.py` has the picture)."""

from __future__ import annotations

import itertools

from ssd_fx.passes.axis import Step
from ssd_fx.passes.joint.layers import valleys


def boundaries(step: Step) -> list[frozenset[int]]:
    """The items that are needed across each boundary, in the order of the forward."""
    reach = _reach(step)
    change = [0] * (step.forward + 1)
    for item, last in zip(step.items, reach, strict=True):
        change[item.produced] += item.nbytes
        change[last] -= item.nbytes
    widths = list(itertools.accumulate(change[: step.forward]))
    spans = [(item.produced, last) for item, last in zip(step.items, reach, strict=True)]
    return [
        frozenset(i for i, (made, last) in enumerate(spans) if made <= at < last)
        for at in valleys(widths)
        if widths[at]
    ]


def _reach(step: Step) -> list[int]:
    """For every item, the last operator of the forward that reads it, or that makes an item recomputed from it."""
    reach = [item.last_use for item in step.items]
    for item in step.items:
        for needed in item.needs:
            reach[needed] = max(reach[needed], item.produced)
    return reach
