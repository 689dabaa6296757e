"""What the planner predicts of a step: of a rival, in which everything stays, and of ours under limits of memory.

Nothing runs. A forecast holds for the rates of a machine, so each function gets the option `machine`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rivals import Call, Rival  # a neighbour of this file
from torch import nn

from ssd_fx import fake
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Limits, Plan, replay_of
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.proposals import cut, decide_for_all
from ssd_fx.survey import Look, T, surveyed

EQUAL_PEAKS = 1.0001  # some kilobytes of a gigabyte


@dataclass(frozen=True)
class Figure:
    """Of a step: the peak above the level before it, seconds, bytes written to the drives. `floor_bytes`: its peak if
    all that can leave memory took no time to do so."""

    peak_bytes: int
    step_s: float
    written_bytes: int
    floor_bytes: int = 0

    @staticmethod
    def of(plan: Plan) -> Figure:
        found = replay_of(plan)
        return Figure(found.peak, found.seconds, found.written, found.step.floor)

    def fits(self, limit_bytes: float) -> bool:
        """Whether the peak is at most the limit, or equal to it but for rounding."""
        return self.peak_bytes <= EQUAL_PEAKS * limit_bytes


Budget = float | Limits
Found = list[Figure | None]


def limit(peak_bytes: float) -> Limits:
    """What a plan may need of memory. How much of it is kept is left to the planner."""
    return Limits(memory=peak_bytes, kept=sys.maxsize)  # messages print it as a whole number, so it is not infinite


def planned_at(budgets: Sequence[Budget], joint: Joint, options: PlanOptions) -> Found:
    """What is predicted under each of the budgets; None where no plan is found that meets it.

    The planner gets all of them at once. If it cannot meet one, that is the tightest limit, and the others are asked
    again. Nodes of ours lower some peaks a little, which is counted once a plan is made. So a limit under the least
    that can be met becomes that, and is met if the plan `fits` it.
    """
    own, asked = cut(joint, options), {budget: budget for budget in budgets}  # and what is asked for instead
    while asked:
        try:
            plans = [plan for _, plan in decide_for_all(joint, own, options, list(asked.values()))]
        except BudgetError as error:
            tightest = min(asked, key=lambda budget: _tightness(asked[budget]))
            if asked[tightest] == tightest and error.least > _tightness(tightest):
                asked[tightest] = limit(error.least)
            else:
                del asked[tightest]
            continue
        found = dict(zip(asked, map(Figure.of, plans), strict=True))
        met = {budget: figure for budget, figure in found.items() if figure.fits(_tightness(budget))}
        return [met.get(each) for each in budgets]
    return [None] * len(budgets)


def _tightness(budget: Budget) -> float:
    """A share can always be met."""
    return budget.memory if isinstance(budget, Limits) else float("inf")


def ours(
    call: Call,
    budgets: Sequence[Budget],
    machine: Mapping[str, Any],
    *,
    recompute: bool = True,
    more: Mapping[str, Any] | None = None,
) -> Found:
    """What is predicted of ssd_fx under each of the budgets: a share, or what `limit` returns. They are asked at once.

    None where no plan is found that meets the budget. Without `recompute`: offload only. `more`: other options.
    """
    look: Look[Found] = partial(planned_at, list(budgets))
    return _surveyed(_without_meta(call), look, machine, {"recompute": recompute} | dict(more or {}))


def of_rival(call: Call, rival: Rival, machine: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Figure:
    """What is predicted of a rival, which keeps all that its forward saves. `call` may change. `more`: as in `ours`."""
    model, inputs = _without_meta(call)
    with rival.around(model):
        return Figure.of(_surveyed((model, inputs), rival.look, machine, more))


def _without_meta(call: Call) -> Call:
    model, (inputs, _) = fake.off_meta(call[0], (call[1], {}))
    assert isinstance(model, nn.Module), "as it was"
    return model, inputs


def _surveyed(call: Call, look: Look[T], machine: Mapping[str, Any], more: Mapping[str, Any] | None) -> T:
    options = {"machine": dict(machine), "allow_tmpfs": True} | dict(more or {})
    return surveyed(call[0], (call[1], {}), look, options)
