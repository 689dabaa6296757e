"""Which partition of a joint graph is best within a budget: PyTorch's own, or one that computes some groups again.

    propose  a plan of PyTorch's partition in which groups may be computed again at a price
    cut      the partition that computes them again
    judge    its own plan, which must be faster than that of PyTorch's partition

Proposals begin from a layered partition as well, which saves what lies between layers (`joint/layers.py`). PyTorch's
may save none of that, and then no layer can be computed again by itself.

Prices do not count the memory that the chain of a group needs while it is computed again. If a partition has a higher
floor for that, the next proposal is made for a limit that is lower by as much. If the floor is above the limit, what is
computed again there is saved in the next proposal.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ssd_fx.passes.joint.collectives import communication
from ssd_fx.passes.joint.compared import compares_again
from ssd_fx.passes.joint.recompute import CutError, Joint, recomputed
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Forecast, Limits, Plan, Recompute
from ssd_fx.passes.planner.budget import Budget
from ssd_fx.passes.planner.solution import EQUAL
from ssd_fx.passes.planner.solve import BudgetError

ROUNDS = 4  # proposals; each takes a short search, and a partition by PyTorch
GAIN = 1e-2  # the share of a step by which recomputing must be predicted to be faster: figures are coarse
SPARED = 0.1  # the share of the bytes written by which recomputing must be predicted to write less, in the same time


class Decide(Protocol):
    """Plans a partition with a short search.

    `priced`: groups may be computed again, but for those of the slots `saved`.
    `analysed`: an earlier, undecided plan of the partition, whose analyses are used.
    """

    def __call__(
        self,
        partition: Partition,
        *,
        budget: Budget,
        priced: bool = False,
        saved: Collection[int] = (),
        analysed: Plan | None = None,
    ) -> Plan: ...


class Over(Protocol):
    """Names of what a partition computes again where it needs more than a limit in bytes, whatever leaves memory."""

    def __call__(self, partition: Partition, plan: Plan, limit: float) -> frozenset[str]: ...


@dataclass(frozen=True)
class Candidate:
    """`again`: what the partition computes again, although no plan asked for it."""

    partition: Partition
    plan: Plan
    again: frozenset[str] = frozenset()

    @property
    def forecast(self) -> Forecast:
        assert self.plan.forecast is not None
        return self.plan.forecast

    def is_within(self, limits: Limits) -> bool:
        return self.forecast.peak <= limits.memory and self.forecast.kept <= limits.kept


class Proposals:
    """The partitions of one joint graph that were tried, for all budgets of a call.

    `own`: PyTorch's partition, with what the analyses find in it. `layered`: makes the layered one, None if there is
    none. `found`: every partition with a plan, so that a loose budget is offered what a tight one has found.
    """

    def __init__(self, joint: Joint, own: Candidate, layered: Callable[[], Candidate | None]) -> None:
        self.joint, self.own = joint, own
        self.layered = functools.cache(layered)
        self.found: list[Candidate] = []
        self._cut: dict[frozenset[str], Partition | None] = {}

    def propose(
        self, decide: Decide, budget: Budget, saved: Collection[int] = (), base: Candidate | None = None
    ) -> Plan:
        """A plan of `base` in which groups may be computed again, but for those of the slots `saved`.

        Raises:
            BudgetError: no plan meets the budget.
        """
        base = base or self.own
        return decide(base.partition, budget=budget, priced=True, saved=saved, analysed=base.plan)

    def within(self, limits: Limits, proposal: Plan, decide: Decide, over: Over) -> Candidate | None:
        """The best partition within limits, with a plan of a short search; None if no plan meets them.

        `proposal`: of PyTorch's partition, where to begin.
        """
        first = self._planned(decide, self.own.partition, limits, self.own.plan)
        if not _gains(proposal, first):
            return best_within(self.found, limits)
        layered = self.layered()
        if layered is not None:
            with suppress(BudgetError):
                begin = self.propose(decide, limits, base=layered)
                self._improve(layered, limits, begin, first, decide, over)
        if _gains(proposal, best_within(self.found, limits)):
            self._improve(self.own, limits, proposal, first, decide, over)
        return best_within(self.found, limits)

    def _improve(
        self, base: Candidate, limits: Limits, proposal: Plan, first: Candidate | None, decide: Decide, over: Over
    ) -> None:
        """Look for partitions within limits, by proposals that begin from `base`."""
        tight, saved = limits, frozenset[int]()
        for _ in range(ROUNDS):
            partition = self._partition_for(proposal, base) if _gains(proposal, first) else None
            if partition is None:
                break
            again = self._planned(decide, partition, limits, None, proposal)
            if again is not None and again.forecast.seconds <= (1 + GAIN) * forecast_of(proposal).seconds:
                break
            plan = decide(partition, budget=1.0) if again is None else again.plan
            floor, own_floor = forecast_of(plan).floor, forecast_of(proposal).floor
            before = tight, saved
            if floor > limits.memory:
                saved |= _made_by(proposal, over(partition, plan, limits.memory))
            else:
                tight = Limits(max(tight.memory - max(floor - own_floor, 0), own_floor), limits.kept)
            if (tight, saved) == before:
                break
            try:
                proposal = self.propose(decide, tight, saved, base)
            except BudgetError:
                break

    def _planned(
        self, decide: Decide, partition: Partition, limits: Limits, analysed: Plan | None, proposal: Plan | None = None
    ) -> Candidate | None:
        """A partition with a plan, which is one more that was found; None if no plan meets the limits."""
        try:
            plan = decide(partition, budget=limits, analysed=analysed)
        except BudgetError:
            return None
        if proposal is not None:
            plan = plan.with_(recomputed=(*proposal.recomputed, *recomputed(proposal)), stock=proposal.stock)
        self.found.append(Candidate(partition, plan))
        return self.found[-1]

    def _partition_for(self, proposal: Plan, base: Candidate) -> Partition | None:
        again = proposal.recomputed_nodes | base.again
        if again not in self._cut:
            self._cut[again] = cut_so(self.joint, self.own, again, proposal)
        return self._cut[again]


def forecast_of(plan: Plan) -> Forecast:
    assert plan.forecast is not None
    return plan.forecast


def best_within(found: Iterable[Candidate], limits: Limits) -> Candidate | None:
    """The fastest of the candidates that keep to the limits; of those about as fast, the one that writes least."""
    able = [candidate for candidate in found if candidate.is_within(limits)]
    if not able:
        return None
    enough_s = (1 + EQUAL) * min(candidate.forecast.seconds for candidate in able)
    near = [candidate for candidate in able if candidate.forecast.seconds <= enough_s]
    return min(near, key=lambda candidate: (candidate.forecast.written, candidate.forecast.seconds))


def _gains(proposal: Plan, first: Candidate | None) -> bool:
    """Whether to cut the graph again: for a step that is faster by more than figures are coarse, or as fast and spares
    the drive.
    """
    assert proposal.forecast is not None
    if not proposal.recomputed_nodes:
        return False
    if first is None or proposal.forecast.seconds < (1 - GAIN) * first.forecast.seconds:
        return True
    spares = proposal.forecast.written < (1 - SPARED) * first.forecast.written
    return spares and proposal.forecast.seconds <= (1 + EQUAL) * first.forecast.seconds


def _made_by(proposal: Plan, names: Collection[str]) -> frozenset[int]:
    """The slots of the groups that are computed again by running nodes of these names."""
    chosen = {slot: d for slot, d in proposal.decisions.items() if isinstance(d, Recompute)}
    return frozenset(slot for slot, decision in chosen.items() if not decision.nodes.isdisjoint(names))


def cut_so(joint: Joint, first: Candidate, again: frozenset[str], proposal: Plan) -> Partition | None:
    """The partition that computes the nodes `again`, as a plan proposes; None where PyTorch cannot make it, or it must
    not be used.

    Other ranks may run PyTorch's own partition, and all must communicate in the same order. So this one must
    communicate like the first one. Its backward must read no further tensor that the caller may change before, and
    compare nothing that it computes again.
    """
    try:
        partition = joint.partition_again(again, proposal.saved_nodes)
    except CutError as error:
        text = f"ssd_fx computes nothing of graph {proposal.graph} again, for PyTorch cannot partition it so: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    if communication(partition) != communication(first.partition):
        return None
    if compares_again(partition):
        return None
    return partition if partition.shared_with_caller <= first.partition.shared_with_caller else None
