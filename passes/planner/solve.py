"""Keep, recompute or offload, for every item together: the least predicted step time, then the fewest bytes written.

The cost of a choice depends on all others (the lanes are shared), so candidates are placed and simulated. The search
starts from families that hold the optimum or a plan near it: some items are recomputed, cheapest per byte first, and as
many of the others offloaded, in some order, as the budget asks. Then it tries other choices for single items.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.compare import better
from ssd_fx.passes.planner.search import Search
from ssd_fx.passes.schedule import Replay


class BudgetError(ValueError):
    """No choices meet a budget of `asked` bytes; `least` is the smallest that can be met, `why` ends the message."""

    def __init__(self, asked: float, least: int, why: str = "") -> None:
        super().__init__(asked, least, why)  # pickle makes it again from these
        self.asked, self.least, self.why = asked, least, why

    def __str__(self) -> str:
        return f"a budget of {self.asked:.0f} B cannot be met; the least that can is {self.least} B{self.why}"


def solve(
    step: Step,
    machine: Machine,
    *,
    limit: float,
    share_bytes: float,
    stays: float = math.inf,
    prefetch: float = math.inf,
    quick: bool = False,
    starts: Iterable[Sequence[Choice]] = (),
    enough_s: float = 0.0,
) -> Replay:
    """The replay of the best choices found, with memory never above `limit` bytes, and at most `share_bytes` kept of
    the items that have a choice. When the backward begins, `stays` bytes of the items are in memory at the most.

    `quick`: the search looks at little more than the families, unless the step is small. `starts`: choices to try too,
    such as those of plans for other limits. `enough_s`: the search ends with a step that takes no more seconds.

    Raises:
        BudgetError: no choices meet `limit`; the message says the least that can be met.
    """
    if limit < step.floor:
        raise BudgetError(limit, step.floor)
    search = Search(step, machine, limit, share_bytes, prefetch, stays=stays, quick=quick, enough_s=enough_s)
    plain = None
    if step.host_budget and all(item.tier != "host" for item in step.items):  # try without it, so as never to be slower
        plain = solve(
            replace(step, host_budget=0),
            machine,
            limit=limit,
            share_bytes=share_bytes,
            stays=stays,
            prefetch=prefetch,
            quick=quick,
            enough_s=enough_s,
        )
        search.solution(tuple(Choice.OFFLOAD if c is Choice.DEFER else c for c in plain.choices))
    search.families()
    for choices in starts:
        search.solution(tuple(choices))
    if search.best is None:  # items without a blocking release were held for longer than the placement assumed
        search.wait_for_writes()
    if search.best is None:
        raise BudgetError(limit, step.floor)
    if not search.is_over():
        search.improve(1 / 8 if quick else 1)
    if not (quick or search.is_over()):
        search.exchange_hosted()
    found = search.least_written()
    return found if plain is None or better(found, plain) else plain
