"""Keep, recompute or offload, for every item together: the least predicted step time, then the fewest bytes written.

What a choice costs depends on all others (the lanes are shared), so candidates are placed and simulated. The search
starts from families that hold the optimum or nearly: some items recomputed, cheapest per byte first; of the others as
many offloaded, in some order, as the budget asks. Then it tries other choices for single items and for pairs.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.anneal import anneal
from ssd_fx.passes.planner.place import floor
from ssd_fx.passes.planner.refine import Solution, better, refine, size
from ssd_fx.passes.planner.search import POOL, Search, effort_of
from ssd_fx.passes.planner.simulate import Step

# Small steps that stall or recompute are walked randomly at the end: so often, each walk over so many operators and
# items, as many changes at most and at least; a second for a dozen items. Few long walks find what many short ones do
# not.
WALKS = 3
# Seconds of a step that must be there to gain: a second of search is worth what it gains in ten thousand steps.
WORTHWHILE = 1e-4
WALKED = 600_000
MOST_WALK = 10_000
LEAST_WALK = 4_000
# Before that, as many operators and items are visited with other choices, near those that led to the best.
KICKED = 60_000


class BudgetError(ValueError):
    """No choices meet a budget of `asked` bytes; `least` is the smallest that can be met, `why` ends the message."""

    def __init__(self, asked: float, least: int, why: str = "") -> None:
        super().__init__(asked, least, why)  # what it can be made again from
        self.asked, self.least, self.why = asked, least, why

    def __str__(self) -> str:
        return f"a budget of {int(self.asked)} B cannot be met; the least that can is {self.least} B{self.why}"


def solve(
    step: Step,
    machine: Machine,
    *,
    limit: float,
    share_bytes: float,
    prefetch: float = float("inf"),
    quick: bool = False,
) -> Solution:
    """The best choices found with memory never above `limit` bytes and at most `share_bytes` kept of what may leave.

    `quick`: only the families are looked at, unless none of them fits; what is found is no faster than without.

    Raises:
        BudgetError: no choices meet `limit`; the message says the least that can be met.
    """
    least = floor(step)
    if limit < least:
        raise BudgetError(limit, least)
    search = Search(step, machine, limit, share_bytes, prefetch)
    plain = None
    if step.host_budget and all(item.tier != "host" for item in step.items):  # never slower than without
        plain = solve(
            replace(step, host_budget=0), machine, limit=limit, share_bytes=share_bytes, prefetch=prefetch, quick=quick
        )
        search.solution(tuple((choice, False) for choice in plain.choices))
    search.families()
    if search.best is None:  # what is handed over was held for longer than the placement reckoned with
        search.wait_for_writes()
    if search.best is None or not (quick or search.is_cheapest()):
        search.improve()
    if search.best is None:
        raise BudgetError(limit, least)
    if quick or search.is_cheapest():
        return search.best
    search.vary()
    effort = effort_of(step) // max(POOL, len(search.pool))
    refined = partial(refine, step, machine, limit=limit, share_bytes=share_bytes, effort=effort, prefetch=prefetch)
    best = search.best
    for start in search.pool:
        best = _better(refined(start), best)
    trials = min(WALKED // size(step), MOST_WALK)
    if WALKS and trials >= LEAST_WALK and best.pays and best.outcome.seconds - sum(step.seconds) > WORTHWHILE:
        search.kick(KICKED)
        best = _better(refined(search.best), best)
        walk = partial(
            anneal, step, machine, best, limit=limit, share_bytes=share_bytes, trials=trials, prefetch=prefetch
        )
        best = functools.reduce(_better, (refined(walk(seed=seed)) for seed in range(WALKS)), best)
    return best if plain is None else _better(plain, best)


def _better(a: Solution, b: Solution) -> Solution:
    return a if better(a.outcome, b.outcome) else b
