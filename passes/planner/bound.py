"""A lower bound on the seconds of all plans: where the best plan found is close to it, the search ends.

    what must go    at least as many bytes as the curve with everything kept is above the limit, or the share
    at what cost    of each item the least of: its nodes on the compute lane; computing it again
    the bound       compute, and the cheapest items per byte until enough is gone, the last one in part

It leaves out lanes, waits and which items are alive at the peak, so it is a bound and no prediction. `bound_with` is
for one set of recomputed items, and counts the lanes. It is near the time of the best plan with that set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ssd_fx.options import TIERS, Tier
from ssd_fx.passes.axis import Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.place import free_bytes
from ssd_fx.passes.planner.replay import again, first_uses, host_s, own_s

Places = npt.NDArray[np.intp]
Seconds = npt.NDArray[np.float64]


def least_bytes(step: Step, limit: float, share_bytes: float) -> float:
    """The bytes that must be offloaded or recomputed, so that memory stays below `limit`, and that no more than
    `share_bytes` are kept of the items that have a choice."""
    free = sum(item.nbytes for item in step.items if len(item.choices) > 1)
    return max(step.everything - limit, free - share_bytes, 0)


def lower_bound(step: Step, machine: Machine, limit: float, share_bytes: float) -> float:
    """A lower bound in seconds for all choices and all placements of them."""
    own = [min(pair) for pair in zip(*(step.once(own_s, machine)[tier] for tier in _tiers(step)), strict=True)]
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
    return max(seconds, host_s(step, (), 0, machine))


def _least(item: Item, own_s: float, again_s: float) -> float:
    """Seconds on the compute lane if the item goes: its four nodes, or computing it again; infinite if it cannot."""
    offload = 2 * own_s if Choice.OFFLOAD in item.choices else math.inf
    return min(offload, again_s if Choice.RECOMPUTE in item.choices else math.inf)


def bound_with(step: Step, machine: Machine, limit: float, choices: Sequence[Choice], stays: float = math.inf) -> float:
    """A lower bound in seconds for plans that recompute the same items, whatever they offload of those that `choices`
    keep. It is infinite if the limit cannot be met.

    At every operator the bytes above the limit are gone. They were written before it began, after the operators that
    make them. In the backward they are read after it has ended, before they are used. When the backward begins, all but
    `stays` bytes are written.
    """
    firsts, count = first_uses(step, choices), step.forward
    free, seconds = free_bytes(step, choices, limit, firsts), np.array(step.seconds)
    for first, again_s in again(step, choices, firsts):
        seconds[first] += again_s
    kept = np.array([i for i in step.movable if choices[i] is Choice.KEEP], dtype=np.intp)
    nbytes, behind = step.arrays.nbytes[kept], len(seconds) + 1
    back = np.bincount(np.array(firsts, dtype=np.intp)[kept], nbytes, behind)
    absent = np.cumsum(np.bincount(step.arrays.last_use[kept] + 1, nbytes, behind) - back)[:-1]
    if (free + absent).min(initial=0) < 0:
        return math.inf
    made = np.cumsum(np.bincount(step.arrays.produced[kept] + 1, nbytes, behind))[:-1]  # before an operator begins
    later = nbytes.sum() - np.cumsum(back)[:-1]  # bytes that are used only behind an operator
    gone = np.maximum(0.0, -free)
    lanes = [machine.lanes(tier) for tier in _tiers(step)]
    write_s, read_s = (
        step.least_moved / sum(bws) for bws in zip(*((t.write_bw, t.read_bw) for t in lanes), strict=True)
    )
    ends, left = np.cumsum(seconds), np.cumsum(seconds[::-1])[::-1]  # left: from its start to the end of the step
    starts = ends - seconds
    turned = max(0.0, nbytes.sum() - stays)  # the bytes that are gone between forward and backward
    must, begun = gone.copy(), np.maximum.accumulate(ends - made * write_s)  # begun: its last write
    must[count] = max(must[count], turned)
    waits = must[1:] * write_s + begun[:-1] - starts[1:]
    starts[1:] += np.maximum.accumulate(np.maximum(0.0, waits))
    turn = max(starts[count - 1] + seconds[count - 1], turned * write_s + begun[count - 1])
    turn += read_s * max(gone[:count].max(initial=0.0), turned)
    read = np.maximum.accumulate(np.append(turn, (starts + seconds + read_s * gone)[count:]))
    starts[count:] = np.maximum(starts[count:], read[:-1] - read_s * later[count:])
    nodes_s = _nodes_s(step, machine, choices, firsts, int(gone.argmax()), gone.max(initial=0.0))
    device_s = float(max(read[-1], (starts + left).max(initial=0.0), ends[-1] + nodes_s))
    return max(device_s, host_s(step, choices, 0, machine))


def _nodes_s(
    step: Step, machine: Machine, choices: Sequence[Choice], firsts: Sequence[int], peak: int, nbytes: float
) -> float:
    """The least seconds of the compute lane for our nodes if `nbytes` bytes are gone at the operator `peak`."""
    order, own, sizes = step.once(_by_own_s, machine)
    may_go = [
        c is Choice.KEEP and last < peak < first for c, last, first in zip(choices, step.last_use, firsts, strict=True)
    ]
    chosen = np.array(may_go, dtype=np.bool_)[order]
    costs, gone = (np.append(0.0, np.cumsum(each[chosen])) for each in (own, sizes))
    return float(np.interp(nbytes, gone, costs))


def _by_own_s(step: Step, machine: Machine) -> tuple[Places, Seconds, Seconds]:
    """The items that may be offloaded, cheapest per byte first; their seconds at both ends together; their bytes."""
    own = 2 * np.min([own_s(step, machine)[tier] for tier in _tiers(step)], axis=0)
    order = np.array(step.movable, dtype=np.intp)
    order = order[np.argsort(own[order] / np.maximum(step.arrays.nbytes[order], 1.0), kind="stable")]
    return order, own[order], step.arrays.nbytes[order]


def _tiers(step: Step) -> Sequence[Tier]:
    return TIERS if step.host_budget else TIERS[:1]
