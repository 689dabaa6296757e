"""What the search compares: choices with the placement of their transfers, and what the simulator says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ssd_fx.passes.planner.items import Choice, Step, Transfer
from ssd_fx.passes.planner.simulate import Outcome

TOLERANCE = 1e-4  # step times that differ by a smaller share are equal; then bytes written count
EQUAL = 5e-3  # of plans that take longer than the best by no larger share, the one that writes least is taken


@dataclass(frozen=True)
class Solution:
    """The choice for every item, the transfers of those that are offloaded, and the simulated step."""

    choices: tuple[Choice, ...]
    transfers: Mapping[int, Transfer]
    outcome: Outcome

    @property
    def loses_time(self) -> bool:
        """Whether it stalls, or computes again what another one may load in time."""
        stalled = self.outcome.stall_s > TOLERANCE * self.outcome.seconds
        return stalled or Choice.RECOMPUTE in self.choices


def better(a: Outcome, b: Outcome) -> bool:
    """Whether step `a` is faster than `b`, or as fast and writes less."""
    if abs(a.seconds - b.seconds) > TOLERANCE * b.seconds:
        return a.seconds < b.seconds
    return (a.written, a.seconds) < (b.written, b.seconds)


def fits(step: Step, outcome: Outcome, limit: float) -> bool:
    """Whether the step keeps its limits, and every write that counts begins as soon as its lane is free."""
    return outcome.peak <= limit and outcome.host_peak <= step.host_budget and not outcome.idle_lane


def kept_bytes(step: Step, choices: tuple[Choice, ...]) -> int:
    """Bytes that are kept of what can be offloaded or recomputed."""
    return sum([nbytes for nbytes, c in zip(step.columns.free_bytes, choices, strict=True) if c is Choice.KEEP])


def size(step: Step) -> int:
    """What simulating the step costs, counted in operators."""
    return len(step.seconds) + 4 * len(step.items)
