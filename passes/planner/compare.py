"""Which of two replays is better, and which are good enough."""

from __future__ import annotations

import math

from ssd_fx.passes.schedule import Replay

TOLERANCE = 1e-4  # step times that differ by a smaller share are equal; then bytes written count
# If several plans take longer than the best by no larger share, the one that writes least is taken: among the plans of
# a partition, and then among partitions. So half a percent is lost at most.
EQUAL = 2.5e-3


def better(a: Replay, b: Replay) -> bool:
    """Whether step `a` is faster than `b`, or as fast and writes less."""
    if abs(a.seconds - b.seconds) > TOLERANCE * b.seconds:
        return a.seconds < b.seconds
    return (a.written, a.seconds) < (b.written, b.seconds)


def fits(found: Replay, limit: float, stays: float = math.inf) -> bool:
    """Whether the step keeps its limits, and every write that counts begins as soon as its lane is free.

    `limit`: bytes at the peak. `stays`: bytes when the backward begins, as in `Limits`.
    """
    if found.idle_lane or found.peak > limit or found.host_peak > found.step.host_budget:
        return False
    return stays == math.inf or found.stays <= stays


def stalls(found: Replay) -> bool:
    return found.stall_s > TOLERANCE * found.seconds
