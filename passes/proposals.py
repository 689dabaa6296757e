"""Which partition of a joint graph is fastest: PyTorch's own, or one that computes some groups again.

    first    PyTorch's own partition, and its plan
    propose  a plan of the first partition in which groups may be computed again at a price
    cut      the partition that computes them again, if the proposal is predicted to be faster
    judge    its plan must be predicted to be faster, too

If the plan of the new partition needs more memory than the budget allows, a tighter limit gives the next proposal.
The budget "auto" then asks for a partition that needs less memory and takes hardly longer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

from ssd_fx.passes.joint.collectives import communication
from ssd_fx.passes.joint.compared import compares_again
from ssd_fx.passes.joint.recompute import CutError, Joint, recomputed
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Forecast, Limits, Plan
from ssd_fx.passes.planner.select import least_auto
from ssd_fx.passes.planner.solution import TOLERANCE
from ssd_fx.passes.planner.solve import BudgetError

ROUNDS = 3  # proposals; each takes a short search, and a partition by PyTorch
GAIN = 1e-2  # the share of a step by which recomputing must be predicted to be faster: figures are coarse


class Decide(Protocol):
    """Plans a partition with a short search.

    `budget`: None for that of the options. `priced`: groups may be computed again. `analysed`: an earlier, unpriced
    plan of the partition, whose analyses are used.
    """

    def __call__(
        self, partition: Partition, *, budget: Limits | None = None, priced: bool = False, analysed: Plan | None = None
    ) -> Plan: ...


@dataclass(frozen=True)
class Candidate:
    partition: Partition
    plan: Plan

    @property
    def forecast(self) -> Forecast:
        assert self.plan.forecast is not None
        return self.plan.forecast


def fastest(joint: Joint, first: Candidate, decide: Decide) -> Candidate:
    """`first`, PyTorch's partition, or one that recomputes more and is predicted to be faster; with its plan."""
    if not _could_gain(first):
        return first
    limits = first.forecast.limits
    tight = limits
    tried = {frozenset[str]()}
    for _ in range(ROUNDS):
        proposal = _propose(first, decide, tight)
        if proposal is None or proposal.recomputed_nodes in tried or not _gains(proposal, first):
            return first
        tried.add(proposal.recomputed_nodes)
        partition_again = _cut_so(joint, first, proposal)
        if partition_again is None:
            return first
        try:
            plan = decide(partition_again, budget=limits)
        except BudgetError as error:  # what is computed again needs memory, which prices do not count
            missing = error.least - limits.memory
            if missing <= 0:  # tensors wait too long for their writes: a tighter limit for the proposal need not help
                return first
            tight = Limits(tight.memory - missing, tight.kept)
            continue
        again = Candidate(partition_again, plan.with_(recomputed=recomputed(proposal), stock=first.plan.stock))
        return again if _gains(again.plan, first) else first
    return first


def smallest(joint: Joint, first: Candidate, best: Candidate, decide: Decide, slowdown: float) -> Candidate:
    """`best` of `fastest`, or a partition that recomputes and needs less memory. For the budget "auto".

    "auto" has found its share with nothing computed again. Where transfers are slow, that is a large one. What is
    computed again needs no transfer. So a smaller share may take no more than `slowdown` longer than everything kept.
    """
    if best.forecast.limits.memory <= least_auto(best.forecast.floor, best.forecast.everything) + 1:
        return best
    try:
        proposal = decide(first.partition, priced=True, analysed=first.plan)
        partition = _cut_so(joint, first, proposal) if proposal.recomputed_nodes else None
        if partition is None:
            return best
        plan = decide(partition)
    except BudgetError:  # "auto" can be met, but not by every search that is as short as these
        return best
    again = Candidate(partition, plan.with_(recomputed=recomputed(proposal), stock=first.plan.stock))
    stall_s = again.forecast.write_stall_s + again.forecast.read_stall_s
    longer_s = stall_s + again.forecast.compute_s - first.forecast.compute_s
    needs_less = again.forecast.limits.memory < (1 - GAIN) * best.forecast.limits.memory
    return again if needs_less and longer_s <= (slowdown + TOLERANCE) * first.forecast.compute_s else best


def _gains(plan: Plan, first: Candidate) -> bool:
    """Whether a plan is predicted to be faster than the first one by more than figures are coarse."""
    assert plan.forecast is not None
    return plan.forecast.seconds < (1 - GAIN) * first.forecast.seconds


def _could_gain(first: Candidate) -> bool:
    """Whether the step has so much time without compute that computing more could pay."""
    return first.forecast.seconds - first.forecast.compute_s > GAIN * first.forecast.seconds


def _propose(first: Candidate, decide: Decide, limits: Limits) -> Plan | None:
    """A plan of the first partition in which groups may be computed again; None if no plan meets the limits."""
    try:
        return decide(first.partition, budget=limits, priced=True, analysed=first.plan)
    except BudgetError:
        return None


def _cut_so(joint: Joint, first: Candidate, proposal: Plan) -> Partition | None:
    """The partition that computes again what is proposed; None where PyTorch cannot make it, or it must not be used.

    Other ranks may run PyTorch's own partition, and all must communicate in the same order. So this one must
    communicate like the first one. Its backward must read no further tensor that the caller may change before, and
    compare nothing that it computes again.
    """
    try:
        partition = joint.partition_again(proposal.recomputed_nodes, proposal.saved_nodes)
    except CutError as error:
        text = f"ssd_fx computes nothing of graph {proposal.graph} again, for PyTorch cannot partition it so: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    if communication(partition) != communication(first.partition):
        return None
    if compares_again(partition):
        return None
    return partition if partition.shared_with_caller <= first.partition.shared_with_caller else None
