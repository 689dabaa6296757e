"""Which partition of a joint graph is best within a budget: PyTorch's own, or one that computes some groups again.

    propose  a plan of PyTorch's partition in which groups may be computed again at a price
    cut      the partition that computes them again
    judge    its own plan, which must be faster than that of PyTorch's partition

Proposals begin from two more partitions. The layered one saves the tensors between layers (`joint/layers.py`).
PyTorch's own partition may save none of these, and then no layer can be computed again by itself. The selective one
saves the results of products too, as a selective checkpoint of every layer does, and it may be taken as it is. The
layered one is cut only if the proposal from PyTorch's own partition is better than all partitions found until then.

Prices do not count the memory that the chain of a group needs while it is computed again. If a partition has a higher
floor for that reason, the next proposal is made for a limit that is lower by as much. If its floor is above the limit,
the next proposal saves those tensors that this partition computes again while memory is above the limit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from ssd_fx.compat import functorch_config, inductor_config, syncs_decisions
from ssd_fx.passes.candidates import Candidate, cut_so, layered, selective
from ssd_fx.passes.decide import analyse, decide
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Limits, Plan, Recompute, replay_of
from ssd_fx.passes.planner.budget import AUTO, SHARES, Budget
from ssd_fx.passes.planner.compare import EQUAL, TOLERANCE
from ssd_fx.passes.planner.select import over, with_nodes
from ssd_fx.passes.planner.solve import BudgetError

ROUNDS = 4  # at most so many proposals; each takes a short search, and a cut by PyTorch
GAIN = 1e-2  # the share of a step by which recomputing must be predicted to be faster: figures are coarse
NEARER = 1e-3  # the same, once the partition of a proposal was as fast as predicted, within its limit
SPARED = 0.1  # recomputing, if it takes the same time, must be predicted to write fewer bytes by this share


def cut(joint: Joint, options: PlanOptions) -> Candidate:
    """PyTorch's own partition, with the plan that the analyses make: the plans for all budgets begin from it.

    Tensors that the user's policy wants to be computed again are not saved, where that is possible. Nothing is decided
    in the plan, so it has no replay.
    """
    partition = joint.partition(again=_may_cut_again(joint, options))
    own = Candidate(partition, analyse(partition, options))
    asked = [slot for slot, mark in own.plan.marks.items() if mark.decision == "recompute"]
    return _computing_again(asked, joint, own, options) if asked and _may_cut_again(joint, options) else own


def _computing_again(asked: Collection[int], joint: Joint, own: Candidate, options: PlanOptions) -> Candidate:
    """The partition that computes the groups of the slots `asked` again, as far as they have a price; else `own`."""
    kept = decide(own.partition, options, budget=1.0, priced=True, quick=True, analysed=own.plan)
    chosen = {slot: Recompute(kept.prices[slot].nodes) for slot in asked if slot in kept.prices}
    plan = kept.with_(decisions=kept.decisions | chosen)
    partition = cut_so(joint, own, plan.recomputed_nodes, plan) if chosen else None
    if partition is None:
        return own
    found = analyse(partition, options).with_(proposal=plan, own=kept)
    return Candidate(partition, found, plan.recomputed_nodes)


def decide_for_all(
    joint: Joint, own: Candidate, options: PlanOptions, budgets: Sequence[Budget]
) -> list[tuple[Partition, Plan]]:
    """The best partition and its plan for each of the budgets. A looser budget never gets a slower step than a tighter
    one. `own`: PyTorch's partition, which is cut already.

    Partitions are compared by plans of a short search. The best partition gets a plan of the full search.
    """
    # The options have a budget that a user can set, and `Limits` is none. With 0.0 instead, which is neither "auto" nor
    # "keep everything", a plan keeps to its limit even if transfers are late or early.
    asked = [replace(options, budget=0.0 if isinstance(budget, Limits) else budget) for budget in budgets]
    if not _may_cut_again(joint, options):
        pairs = zip(asked, budgets, strict=True)
        plans = [decide(own.partition, o, budget=b, analysed=own.plan) for o, b in pairs]
        return [(own.partition, with_nodes(own.partition, plan)) for plan in plans]
    first = [propose(own, o, b) for o, b in zip(asked, budgets, strict=True)]
    proposals = Proposals(joint, own, options, first[0])
    found: dict[int, Candidate] = {}
    for i in sorted(range(len(asked)), key=lambda i: first[i].limits.memory):  # the tightest first
        found[i] = proposals.best(asked[i], budgets[i], first[i])
        proposals.found.append(found[i])
    return [(found[i].partition, with_nodes(found[i].partition, found[i].plan)) for i in range(len(asked))]


def decide_with_room(joint: Joint, own: Candidate, options: PlanOptions) -> tuple[Partition, Plan]:
    """The best partition and its plan, if measured steps left `options.room` free (a share, see `PlanOptions`). The
    partition for the options' own budget is taken instead if it is hardly slower, or if the peak of the other is higher
    by more than half of the room.

    In either case the plan is made for the options' own budget. The runtime holds as many bytes as it measures to fit,
    whatever the plan says, and later it may have to hold fewer. So the room decides only which tensors are computed
    again.
    """
    (least, lowest), (partition, roomy) = decide_for_all(joint, own, options, [options.budget, options.room])
    tight, loose = replay_of(lowest), replay_of(roomy)
    if loose.seconds > (1 - GAIN) * tight.compute_s:  # waits do not count: held tensors wait for no drive
        return least, lowest
    plan = with_nodes(partition, decide(partition, options, analysed=roomy))
    room = options.room * (loose.step.everything - loose.step.floor)
    more = replay_of(plan).peak - tight.peak
    return (partition, plan) if more <= room / 2 else (least, lowest)  # the rest of the room is for held tensors


def propose(base: Candidate, options: PlanOptions, budget: Budget, saved: Collection[int] = ()) -> Plan:
    """A plan of `base` in which groups may be computed again, except those of the slots `saved`.

    Raises:
        BudgetError: no plan meets the budget.
    """
    return decide(base.partition, options, budget=budget, priced=True, saved=saved, quick=True, analysed=base.plan)


class Proposals:
    """The partitions of one joint graph that were tried, for all budgets of a call.

    `own`: PyTorch's partition, with the plan that the analyses make. `priced`: a plan of it with prices. `found`: every
    partition that got a plan, so that a loose budget may take one that a tight budget has found. Methods get `options`
    with the budget that they are for.
    """

    def __init__(self, joint: Joint, own: Candidate, options: PlanOptions, priced: Plan) -> None:
        self.joint, self.own, self.options, self.priced = joint, own, options, priced
        self.found: list[Candidate] = []
        self._cut: dict[tuple[frozenset[str], ...], Partition | None] = {}  # by what is computed again, and saved

    @functools.cached_property
    def layered(self) -> Candidate | None:
        """The partition that saves the tensors between layers, or None."""
        return layered(self.joint, self.own, self.options)

    @functools.cached_property
    def selective(self) -> Candidate | None:
        """The partition that saves the results of products too, as a selective checkpoint does, or None."""
        return selective(self.joint, self.own, self.priced, self.options)

    def best(self, options: PlanOptions, budget: Budget, proposal: Plan) -> Candidate:
        """The best partition for a budget, with a plan of the full search, or of the short search if that is better.

        `proposal`: a plan of PyTorch's partition for this budget in which groups may be computed again.
        """
        limits, own = proposal.limits, self.own
        best = self.within(options, limits, proposal)
        if best is None:  # only a partition that recomputes could meet the limits, and none was found
            plan = decide(own.partition, options, budget=budget, quick=True, analysed=own.plan)
            best, limits = Candidate(own.partition, plan), plan.limits
        if budget == AUTO:
            best, limits = self._fast_enough(options, best, limits, proposal)
        try:
            plan = decide(best.partition, options, budget=limits, analysed=best.plan)
        except BudgetError:  # the plan of `best` is one that the search for a tighter budget has found
            return best
        full = Candidate(best.partition, plan)
        if isinstance(options.budget, int) and options.budget:
            return full  # plans for other budgets lack `Limits.shared`, the budget over all graphs
        return best_within([best, full], limits) or full

    def _fast_enough(
        self, options: PlanOptions, best: Candidate, limits: Limits, proposal: Plan
    ) -> tuple[Candidate, Limits]:
        """For "auto": the best partition that is as fast as `slowdown` asks, and its limits: the proposal's, or looser
        ones if need be.

        The proposal itself is fast enough, but to compute tensors again may take longer than their prices say.
        """
        own = replay_of(proposal)
        fast_s = (1 + options.slowdown + TOLERANCE) * own.compute_s
        for shares in (1, 2, 4, 8, 16):  # their sum is above SHARES, so in the end everything may stay
            if best.replay.seconds <= fast_s or limits.memory >= own.step.everything:
                return best, limits
            more = shares * (own.step.everything - own.step.floor) / SHARES
            limits = replace(limits, memory=limits.memory + more, kept=limits.kept + more)
            try:
                proposal = propose(self.own, options, limits)
            except BudgetError:
                break
            best = self.within(options, limits, proposal) or best
        return best, limits

    def within(self, options: PlanOptions, limits: Limits, proposal: Plan) -> Candidate | None:
        """The best partition within limits, with a plan of a short search; None if no plan meets them.

        `proposal`: the first proposal, a plan of PyTorch's partition.
        """
        first = self._planned(options, limits, self.own.partition, analysed=self.own.plan)
        if not _gains(proposal, first):
            return best_within(self.found, limits)
        if self.selective is not None:
            self._planned(options, limits, self.selective.partition, analysed=self.selective.plan)
            self._begin(options, limits, self.selective, first)
        if self._is_better(proposal, limits) and self.layered is not None:
            self._begin(options, limits, self.layered, first)
        if self._is_better(proposal, limits):
            self._improve(options, limits, self.own, proposal, first)
        return best_within(self.found, limits)

    def _is_better(self, proposal: Plan, limits: Limits, gain: float = EQUAL) -> bool:
        """Whether the step of a proposal is better, by the share `gain`, than that of the best partition found."""
        return _gains(proposal, best_within(self.found, limits), gain)

    def _may_gain(self, base: Candidate, limits: Limits) -> bool:
        """Whether a proposal from `base` may be better than all found. None takes less time than the compute of
        `base`."""
        best = best_within(self.found, limits)
        if best is None or best.replay.written or base.plan.node_ms is None:
            return True
        compute_s = math.fsum(starts[-1] for starts in base.plan.node_ms) / 1e3
        return compute_s < (1 - EQUAL) * best.replay.seconds

    def _begin(self, options: PlanOptions, limits: Limits, base: Candidate, first: Candidate | None) -> None:
        """Look for partitions within limits, starting from `base`, if its proposal is better than all found."""
        if not self._may_gain(base, limits):
            return
        with suppress(BudgetError):
            proposal = propose(base, options, limits)
            if self._is_better(proposal, limits):
                self._improve(options, limits, base, proposal, first)

    def _improve(
        self, options: PlanOptions, limits: Limits, base: Candidate, proposal: Plan, first: Candidate | None
    ) -> None:
        """Look for partitions within limits, by proposals that begin from `base`.

        The partition of a proposal for these limits may need more memory than predicted. That of a proposal for tighter
        limits may need less than the limits allow. Then the next proposal is for a limit half way between the two.
        """
        tight, saved, met = limits, frozenset[int](), 0.0
        above = limits.memory
        for left in reversed(range(ROUNDS)):
            partition = self._partition_for(proposal, base) if _gains(proposal, first) else None
            if partition is None:
                break
            again = self._planned(options, limits, partition, proposal=proposal)
            before, asked = (tight, saved), proposal.recomputed_nodes
            if again is not None and again.replay.seconds <= (1 + EQUAL) * replay_of(proposal).seconds:
                met = tight.memory
            else:
                above = tight.memory
            if met:
                tight = replace(tight, memory=(met + above) / 2)
            else:
                plan = decide(partition, options, budget=1.0, quick=True) if again is None else again.plan
                floor, own_floor = replay_of(plan).step.floor, replay_of(proposal).step.floor
                if floor > limits.memory:
                    saved |= _made_by(proposal, over(partition, plan, limits.memory, options))
                else:
                    tight = replace(tight, memory=max(tight.memory - max(floor - own_floor, 0), own_floor))
            if (tight, saved) == before or not left:
                break
            try:
                proposal = propose(base, options, tight, saved)
            except BudgetError:
                break
            # PyTorch's cut may find a cheaper way than the chains, so a slower proposal may be cut into a faster plan
            if proposal.recomputed_nodes == asked or not self._is_better(proposal, limits, NEARER if met else -GAIN):
                break

    def _planned(
        self,
        options: PlanOptions,
        limits: Limits,
        partition: Partition,
        *,
        analysed: Plan | None = None,
        proposal: Plan | None = None,
    ) -> Candidate | None:
        """Plan a partition, and add it to `found`; None if no plan meets the limits."""
        try:
            plan = decide(partition, options, budget=limits, quick=True, analysed=analysed)
        except BudgetError:
            return None
        if partition is not self.own.partition:
            asked = proposal or plan.proposal  # a selective partition has its proposal from the start
            plan = plan.with_(proposal=asked, own=self.priced.origin)
        self.found.append(Candidate(partition, plan))
        return self.found[-1]

    def _partition_for(self, proposal: Plan, base: Candidate) -> Partition | None:
        again = proposal.recomputed_nodes | base.again
        key = (again, proposal.saved_nodes)  # a proposal from another base may compute the same again, and save others
        if key not in self._cut:
            self._cut[key] = cut_so(self.joint, self.own, again, proposal)
        return self._cut[key]


def best_within(found: Iterable[Candidate], limits: Limits) -> Candidate | None:
    """The fastest of the candidates that keep to the limits; of those about as fast, the one that writes least."""
    able = [candidate for candidate in found if candidate.is_within(limits)]
    if not able:
        return None
    enough_s = (1 + EQUAL) * min(candidate.replay.seconds for candidate in able)
    near = [candidate for candidate in able if candidate.replay.seconds <= enough_s]
    return min(near, key=lambda candidate: (candidate.replay.written, candidate.replay.seconds))


def _gains(proposal: Plan, first: Candidate | None, gain: float = GAIN) -> bool:
    """Whether to cut the graph again: for a step that is faster by a share `gain`, or is as fast and spares the
    drive."""
    if not proposal.recomputed_nodes:
        return False
    found = replay_of(proposal)
    if first is None or found.seconds < (1 - gain) * first.replay.seconds:
        return True
    spares = found.written < (1 - SPARED) * first.replay.written
    return spares and found.seconds <= (1 + EQUAL) * first.replay.seconds


def _made_by(proposal: Plan, names: Collection[str]) -> frozenset[int]:
    """The slots of the groups that are computed again by running nodes of these names."""
    chosen = {slot: d for slot, d in proposal.decisions.items() if isinstance(d, Recompute)}
    return frozenset(slot for slot, decision in chosen.items() if not decision.nodes.isdisjoint(names))


def _may_cut_again(joint: Joint, options: PlanOptions) -> bool:
    return options.recompute and not _is_partitioned_once() and not joint.has_own_budget


def _is_partitioned_once() -> bool:
    """Whether a setting of PyTorch forbids several partitions of one graph.

    * The user has PyTorch recompute.
    * The ranks agree on what is saved: they exchange it for each partition, so all must make equally many partitions.
    * PyTorch quantizes what is saved, and notes that in the graph.
    """
    quantizes = "activation_quantization_aten_pass" in inductor_config.post_grad_fusion_options
    return functorch_config.activation_memory_budget != 1 or syncs_decisions() or quantizes
