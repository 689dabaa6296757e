"""A lower bound on the seconds of all plans: where the best plan found is close to it, the search ends.

    what must go    at least as many bytes as the curve with everything kept is above the limit, or the share
    at what cost    of each item the least of: its nodes on the compute lane; computing it again
    the bound       compute, and the cheapest items per byte until enough is gone, the last one in part

It leaves out lanes, waits and which items are alive at the peak, so it is a bound and no prediction.
"""

from __future__ import annotations

import math

from ssd_fx.options import TIERS
from ssd_fx.passes.axis import Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.replay import own_s


def least_bytes(step: Step, limit: float, share_bytes: float) -> float:
    """The bytes that must be offloaded or recomputed, so that memory stays below `limit` and no more than `share_bytes`
    are kept of what may be."""
    free = sum(item.nbytes for item in step.items if len(item.choices) > 1)
    return max(step.everything - limit, free - share_bytes, 0)


def lower_bound(step: Step, machine: Machine, limit: float, share_bytes: float) -> float:
    """Seconds; no choices and no placement of them take less."""
    tiers = TIERS if step.host_budget else TIERS[:1]
    own = [min(pair) for pair in zip(*(step.once(own_s, machine)[tier] for tier in tiers), strict=True)]
    costs = [(item, _least(item, *pair)) for item, *pair in zip(step.items, own, step.own_again_s, strict=True)]
    forced = [(item, cost) for item, cost in costs if Choice.KEEP not in item.choices]
    seconds = math.fsum(step.seconds) + math.fsum(cost for _, cost in forced)
    left = least_bytes(step, limit, share_bytes) - sum(item.nbytes for item, _ in forced)
    free = [(item, cost) for item, cost in costs if Choice.KEEP in item.choices and cost < math.inf and item.nbytes]
    for item, cost in sorted(free, key=lambda pair: pair[1] / pair[0].nbytes):
        if left <= 0:
            break
        seconds += cost * min(1.0, left / item.nbytes)
        left -= item.nbytes
    return seconds


def _least(item: Item, own_s: float, again_s: float) -> float:
    """Seconds on the compute lane if the item goes: its four nodes, or computing it again; infinite if it cannot."""
    offload = 2 * own_s if Choice.OFFLOAD in item.choices else math.inf
    return min(offload, again_s if Choice.RECOMPUTE in item.choices else math.inf)
