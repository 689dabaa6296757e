"""The limits that a budget sets, in bytes, and the plan for them.

    share     the peak may be the floor, and this share of the way from there to the peak with everything kept
    bytes     the peak may be so much above the floor
    0         the lowest peak that is worth having
    "auto"    the lowest peak whose step takes hardly longer than with everything kept

The floor is the peak if everything that can leave memory is gone, with infinitely fast transfers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.plan import Limits
from ssd_fx.passes.planner.bound import lower_bound
from ssd_fx.passes.planner.compare import TOLERANCE, better
from ssd_fx.passes.planner.solve import BudgetError, solve
from ssd_fx.passes.schedule import Replay

Budget = int | float | str | Limits
AUTO = "auto"
SHARES = 20  # "auto" takes one of the shares 0, 1/20, 2/20, ... 20/20
# No share allows less than this factor times the floor. At the floor itself nothing can be read early, so steps wait.
HEADROOM = 1.05
RUNGS = (1.0, 1.01, 1.02, 1.03, HEADROOM, 1.1, 1.2, 1.5, 2.0, math.inf)  # limits tried for budget 0, times the floor
MORE_PEAK, LESS_TIME = 0.05, 0.1  # budget 0 takes a peak up to 5% higher where the step gets 10% shorter

Solved = tuple[Replay, Limits]


def solve_for(
    step: Step,
    budget: Budget,
    machine: Machine,
    prefetch: float = math.inf,
    *,
    quick: bool = False,
    slowdown: float = 0.0,
    whole: bool = False,
) -> Solved:
    """The best replay for a budget as the options give it, and the limits that follow from it.

    `whole`: the graph is a whole training step, whose backward follows its forward. Then a budget limits the peak
    alone, and tensors that do not lower it stay. The saved tensors of other graphs, such as one of many blocks, pile
    up. So there a share also limits how many of the bytes that can leave are in memory when the forward ends, kept or
    not written yet. "auto" asks for no limit, so it does not wait for writes there.

    Raises:
        BudgetError: no choices meet the limits.
    """
    solver = _Solver(step, machine, prefetch, whole)
    if isinstance(budget, Limits):
        return solver.solved(budget, quick=quick)
    if budget not in (AUTO, 0):
        return solver.solved(limits(step, budget, whole=whole), quick=quick)
    # several short searches find the limits; then one full search makes the plan for them
    found = solver.auto(slowdown) if budget == AUTO else solver.lowest()
    full = found if quick else solver.solved(found[1], quick=False)
    return full if better(full[0], found[0]) else found


def limits(step: Step, budget: int | float | str, *, whole: bool = False, waits: bool = True) -> Limits:
    """The limits for a budget: a share of the range from the floor to everything kept, or bytes beyond the floor.

    `waits`: unless the graph is a whole step, the forward waits at its end until no more bytes are in memory than may.
    """
    if isinstance(budget, float):
        more = budget * (step.everything - step.floor)
        left = budget * sum(item.nbytes for item in step.items if item.choices != {Choice.KEEP})
        kept = math.inf if whole else left
    else:
        more = left = int(budget)
        kept = 0
    return Limits(max(HEADROOM * step.floor, step.floor + more), kept, left if waits and not whole else math.inf)


def is_worth(peak: float, seconds: float, higher_peak: float, other_seconds: float) -> bool:
    """Whether a higher peak is worth the time that it saves, at budget 0."""
    return higher_peak <= (1 + MORE_PEAK) * peak and other_seconds <= (1 - LESS_TIME) * seconds


@dataclass(frozen=True)
class _Solver:
    """Solves one step under several limits. Every search tries the choices of the replays `found` before it, too."""

    step: Step
    machine: Machine
    prefetch: float
    whole: bool
    found: list[Replay] = field(default_factory=list)

    def solved(self, at: Limits, *, quick: bool = True, enough_s: float = 0.0) -> Solved:
        starts = [earlier.choices for earlier in self.found]
        found = solve(
            self.step,
            self.machine,
            limit=at.memory,
            share_bytes=at.kept,
            stays=at.stays,
            prefetch=self.prefetch,
            quick=quick,
            starts=starts,
            enough_s=enough_s,
        )
        self.found.append(found)
        return found, at

    def lowest(self, *, waits: bool = True) -> Solved:
        """The solution with the lowest peak, or one that is hardly higher and much faster; `waits` as in `limits`.

        Raises:
            BudgetError: no limit can be met.
        """
        least, most = self.step.floor, HEADROOM * self.step.everything
        nothing = limits(self.step, 0.0, whole=self.whole, waits=waits)
        tried: list[Solved] = []
        for limit in dict.fromkeys(min(rung * least, most) if least else most for rung in RUNGS):
            at = replace(nothing, memory=limit)
            if tried and at.memory > (1 + MORE_PEAK) * tried[0][1].memory:
                break
            try:
                tried.append(self.solved(at))
            except BudgetError:
                if limit == most:
                    raise
                continue
            if (1 - LESS_TIME) * tried[0][0].seconds < sum(self.step.seconds):
                return tried[0]  # nothing can be faster by so much
        lowest, best = tried[0], min(tried, key=lambda each: each[0].seconds)
        worth = is_worth(lowest[1].memory, lowest[0].seconds, best[1].memory, best[0].seconds)
        return best if worth else lowest

    def auto(self, slowdown: float) -> Solved:
        """The least share whose step takes at most `slowdown` longer than the one with everything kept.

        All counts: waits, recomputing, starting transfers, and a host that has more to do than the device.
        The share is found by doubling and bisection, since less memory does not take less time. The lowest peak takes
        several searches, so it comes last.
        """

        def at(share: int) -> Limits:
            return limits(self.step, share / SHARES, whole=self.whole, waits=False)

        @functools.cache
        def searched(share: int) -> Solved:
            return self.solved(at(share)) if share else self.lowest(waits=False)

        allowed_s = (1 + slowdown + TOLERANCE) * searched(SHARES)[0].seconds

        def is_cheap(share: int) -> bool:
            if share and lower_bound(self.step, self.machine, at(share).memory, at(share).kept) > allowed_s:
                return False
            try:
                found = self.solved(at(share), enough_s=allowed_s) if share else searched(0)
                return found[0].seconds <= allowed_s
            except BudgetError:  # tensors wait too long for their writes
                return False

        low, high = 0, 1
        while high < SHARES and not is_cheap(high):
            low, high = high, min(2 * high, SHARES)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_cheap(middle) else (middle, high)
        return searched(0 if high == 1 and is_cheap(0) else high)
