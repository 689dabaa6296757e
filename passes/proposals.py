"""Which partition of a joint graph is fastest: propose to compute groups again, partition so, judge by a plan.

    first    PyTorch's own partition, and its plan
    propose  a plan of the first partition in which groups may be computed again at a price
    judge    a partition that computes them again is planned like the first one; it must be predicted to be faster

A proposal whose partition needs more memory than the budget allows is made again under a tighter limit.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

from ssd_fx.passes.joint.collectives import communication
from ssd_fx.passes.joint.recompute import Joint, recomputed
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Limits, Plan, Prediction
from ssd_fx.passes.planner.solve import BudgetError

ROUNDS = 3  # proposals; each takes a short search, and a partition by PyTorch
GAIN = 5e-3  # the share of a step by which recomputing must be predicted to be faster: figures are coarse


class Decide(Protocol):
    """Plans a partition with a short search.

    `budget`: None for that of the options. `priced`: groups may be computed again. `analysed`: an earlier, unpriced
    plan of the partition.
    """

    def __call__(
        self, partition: Partition, *, budget: Limits | None = None, priced: bool = False, analysed: Plan | None = None
    ) -> Plan: ...


@dataclass(frozen=True)
class Candidate:
    partition: Partition
    plan: Plan

    @property
    def prediction(self) -> Prediction:
        assert self.plan.prediction is not None
        return self.plan.prediction

    @property
    def seconds(self) -> float:
        return self.prediction.solution.outcome.seconds


def fastest(joint: Joint, decide: Decide) -> Candidate:
    """PyTorch's partition, or one that recomputes and is predicted to be faster.

    Raises:
        BudgetError: PyTorch's partition cannot meet the budget.
    """
    partition = joint.partition(again=True)
    first = Candidate(partition, decide(partition))
    limits = tight = first.prediction.limits
    tried = {frozenset[str]()}
    for _ in range(ROUNDS if _could_gain(first) else 0):
        proposal = _propose(first, decide, tight)
        if proposal is None or proposal.recomputed_nodes in tried:
            return first
        tried.add(proposal.recomputed_nodes)
        partition_again = _cut_so(joint, first, proposal)
        if partition_again is None:
            return first
        try:
            plan = decide(partition_again, budget=limits)
        except BudgetError as error:  # the chains need memory that their prices do not tell of
            missing = error.least - limits.memory
            if missing <= 0:  # the floor is within the limit, so a tighter limit for the proposal need not help
                return first
            tight = Limits(tight.memory - missing, tight.kept)
            continue
        if Candidate(partition_again, plan).seconds < (1 - GAIN) * first.seconds:
            return Candidate(partition_again, plan.with_(recomputed=recomputed(proposal)))
        return first
    return first


def _could_gain(first: Candidate) -> bool:
    """Whether so much of the step is no compute that computing more could pay."""
    return first.seconds - sum(first.prediction.modelled.step.seconds) > GAIN * first.seconds


def _propose(first: Candidate, decide: Decide, limits: Limits) -> Plan | None:
    """A plan of the first partition in which groups may be computed again; None if no plan meets the limits."""
    try:
        return decide(first.partition, budget=limits, priced=True, analysed=first.plan)
    except BudgetError:
        return None


def _cut_so(joint: Joint, first: Candidate, proposal: Plan) -> Partition | None:
    """The partition that computes again what is proposed; None where there is none that other ranks could take too.

    It communicates like the first one, and reads nothing more that the caller may change before the backward.
    """
    try:
        partition = joint.partition_again(proposal.recomputed_nodes, proposal.saved_nodes)
    except RuntimeError as error:
        told = f"ssd_fx computes nothing of graph {proposal.graph} again, for PyTorch cannot partition it so: {error}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        return None
    alike = communication(partition) == communication(first.partition)
    return partition if alike and partition.lent <= first.partition.lent else None
