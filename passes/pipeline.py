"""Every pass, in the order in which it runs.

    JOINT              on the joint graph, before PyTorch's min-cut partitions it
    AFTER_CUT          on every partition that PyTorch's min-cut makes of it
    analyses           facts about a partition, which no decision changes
    decisions          keep, offload or recompute each alias group, and where the nodes go
    rewrite            puts the nodes of the plan into both graphs
    LAST               on both graphs, whatever was planned
    inductor_passes    within Inductor, on its graph and on its kernels

`proposals.py` runs AFTER_CUT, analyses and decisions for several partitions. The verifier runs after every pass of
analyses and decisions, and after the rewrite. `lowering/audit.py` checks the generated code when it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ssd_fx.compat import CustomPartitionerFn, functorch_config, inductor_config, syncs_decisions
from ssd_fx.passes.alias.copies import merge_copies
from ssd_fx.passes.alias.storages import alias
from ssd_fx.passes.cost.lifetime import lifetime
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.roofline import time
from ssd_fx.passes.joint.compared import keep_compared
from ssd_fx.passes.joint.layers import between_layers
from ssd_fx.passes.joint.marks import LiftMarks, lift, mark
from ssd_fx.passes.joint.mutated_inputs import copy_changed_inputs, save_what_reads_changed_inputs
from ssd_fx.passes.joint.recompute import CutError, Joint, price, recomputed
from ssd_fx.passes.joint.stale_views import merge_equal, rejoin_views
from ssd_fx.passes.notices import warn
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, fingerprint
from ssd_fx.passes.plan import Limits, Plan, PlanPass, Recompute
from ssd_fx.passes.planner.budget import AUTO, SHARES, Budget
from ssd_fx.passes.planner.select import over, select
from ssd_fx.passes.planner.solution import TOLERANCE
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.proposals import Candidate, Decide, Proposals, best_within, cut_so, forecast_of
from ssd_fx.passes.rewrite.insert import insert
from ssd_fx.passes.rewrite.lite_mode import annotate_ours
from ssd_fx.passes.rewrite.refuse import kept_activations, refuse_stand_ins
from ssd_fx.passes.stages import Stages
from ssd_fx.passes.verify.graphs import verify_graphs
from ssd_fx.passes.verify.interface import Before
from ssd_fx.passes.verify.plan import verify_plan

_UNSEEN = Stages(on=False)

JOINT: tuple[Callable[[fx.Graph], fx.Graph | None], ...] = (
    lift,  # first: marks are nodes that would hide patterns. Under Inductor they are gone already (inductor_passes)
    rejoin_views,  # corrects the metadata of views, which the next passes read
    merge_equal,  # as the cut would: the views of what it merges are rejoined as well
    save_what_reads_changed_inputs,  # tags what the cut must save
)

AFTER_CUT: tuple[Callable[[Partition], None], ...] = (
    copy_changed_inputs,  # only the cut says what the backward reads of the inputs that the step changes
)


def analyses(options: PlanOptions, machine: Machine) -> tuple[PlanPass, ...]:
    return (
        alias,  # first: the alias group is the unit of everything that follows
        *([keep_compared] if options.lossy else []),  # before merge_copies, which passes over what has an obstacle
        partial(  # marks groups, binds select
            mark,
            keep=options.keep,
            offload=options.offload,
            roots=options.roots,
            policy=options.policy,
            min_bytes=options.min_bytes,
            recompute=options.recompute,
        ),
        merge_copies,  # after mark: a copy that is marked otherwise than its source stays a separate group
        partial(time, machine=machine),
        lifetime,
    )


def decisions(
    options: PlanOptions,
    machine: Machine,
    budget: Budget,
    *,
    priced: bool,
    saved: Collection[int],
    host_tier: bool,
    quick: bool,
) -> tuple[PlanPass, ...]:
    """`priced`, `saved`, `quick`: as in `decide`; `host_tier`: as in `select`."""
    return (
        *([partial(price, saved=saved)] if priced else []),  # needs the groups and the times
        # decides and places together, since the cost of a decision depends on where its nodes can be
        partial(select, options=options, machine=machine, budget=budget, host_tier=host_tier, quick=quick),
    )


LAST: tuple[Callable[[Partition], None], ...] = (
    refuse_stand_ins,  # after the rewrite: it is about what is kept, even if that is everything
    annotate_ours,  # behind all that adds nodes
)


def inductor_passes(partitioner: CustomPartitionerFn, version: str) -> dict[str, Any]:
    """Settings of Inductor that make it run our passes, in the order of the settings below.

    `version`: of the package's source, for compile caches. What the user has set is run as well.
    """
    from ssd_fx.passes.lowering.order import BeforeFusion, PinOrder  # imports the scheduler

    return {
        # before Inductor's own patterns, which marks would hide
        "joint_custom_pre_pass": LiftMarks(version, _as_tuple(inductor_config.joint_custom_pre_pass)),
        "custom_partitioner_fn": partitioner,  # JOINT to LAST
        # before fusion, which could reverse operators that communicate
        "_pre_fusion_custom_pass": BeforeFusion(version, inductor_config._pre_fusion_custom_pass),
        # after fusion: makes the planned order the only one that later passes can choose
        "_post_fusion_custom_pass": PinOrder(version, inductor_config._post_fusion_custom_pass),
    }


def joint_of(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    arguments: dict[str, Any],
    stages: Stages = _UNSEEN,
    lasting: frozenset[int] | None = None,
) -> Joint:
    """The joint graph, ready to be cut; `inputs`, `arguments` are those of PyTorch's min-cut, `lasting` of `Joint`."""
    stages.after("joint", joint=gm)
    for each in JOINT:
        other = each(gm.graph)
        if other is not None:
            gm.graph = other
        stages.after(each.__name__, joint=gm)
    return Joint(gm, inputs, arguments, AFTER_CUT, lasting)


def decide(
    partition: Partition,
    options: PlanOptions,
    *,
    budget: Budget | None = None,
    priced: bool = False,
    saved: Collection[int] = (),
    quick: bool = False,
    analysed: Plan | None = None,
) -> Plan:
    """A plan of `partition`, which does not change.

    `budget`: None for that of the options. `priced`: groups may be recomputed, which needs another partition, but for
    those of the slots `saved`. `quick`: with a short search. `analysed`: an earlier, unpriced plan of the partition,
    whose analyses are used.
    """
    plan = analysed.undecided() if analysed else analyse(partition, options)
    budget = options.budget if budget is None else budget
    host_tier = _device(partition).type != "cpu"
    machine = _machine(partition, options)
    passes = decisions(options, machine, budget, priced=priced, saved=saved, host_tier=host_tier, quick=quick)
    return _run(passes, partition, plan)


def analyse(partition: Partition, options: PlanOptions) -> Plan:
    """What the analyses find in `partition`, with nothing decided; no budget changes it."""
    plan = Plan(graph=fingerprint(partition, options.chosen))
    return _run(analyses(options, _machine(partition, options)), partition, plan)


def _run(passes: Sequence[PlanPass], partition: Partition, plan: Plan) -> Plan:
    for pass_ in passes:
        plan = pass_(partition, plan)
        verify_plan(partition, plan)
    return plan


def decide_joint(joint: Joint, options: PlanOptions) -> tuple[Partition, Plan]:
    """The best partition within the budget, and its plan."""
    return decide_for_all(joint, cut(joint, options), options, [options.budget])[0]


def cut(joint: Joint, options: PlanOptions) -> Candidate:
    """PyTorch's own partition, with what the analyses find in it: where the plan for any budget begins.

    What the user's policy wants to be computed again is not saved, where that is possible. Nothing is decided in the
    plan, so it has no forecast.
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
    found = analyse(partition, options).with_(recomputed=recomputed(plan), stock=kept.stock)
    return Candidate(partition, found, plan.recomputed_nodes)


def decide_for_all(
    joint: Joint, own: Candidate, options: PlanOptions, budgets: Sequence[Budget]
) -> list[tuple[Partition, Plan]]:
    """`decide_joint` for several budgets, of a graph that is cut already: no looser one takes longer than a tighter.

    Plans of a short search compare the partitions. The best one gets a plan of the full search.
    """
    # limits are no budget of a user's, so nothing of the options depends on them
    asked = [replace(options, budget=0.0 if isinstance(budget, Limits) else budget) for budget in budgets]
    if not _may_cut_again(joint, options):
        pairs = zip(asked, budgets, strict=True)
        return [(own.partition, decide(own.partition, o, budget=b, analysed=own.plan)) for o, b in pairs]
    proposals = Proposals(joint, own, partial(_layered, joint, own, options))
    first = [proposals.propose(partial(decide, options=o, quick=True), b) for o, b in zip(asked, budgets, strict=True)]
    found: dict[int, Candidate] = {}
    for i in sorted(range(len(asked)), key=lambda i: forecast_of(first[i]).limits.memory):  # the tightest first
        found[i] = _best(proposals, asked[i], budgets[i], first[i])
        proposals.found.append(found[i])
    return [(found[i].partition, found[i].plan) for i in range(len(asked))]


def _layered(joint: Joint, own: Candidate, options: PlanOptions) -> Candidate | None:
    """The partition that saves what lies between layers, with what the analyses find in it; None if it cannot be made.

    Nothing is decided in its plan. Proposals begin from it, and it is never used as it is.
    """
    between = between_layers(own.partition)
    if not between.saved:
        return None
    try:
        partition = joint.partition_again(between.again | own.again, between.saved)
    except CutError as error:
        text = f"ssd_fx begins no plan of graph {own.plan.graph} from its layers, for PyTorch cannot partition it so: "
        warnings.warn(text + str(error), RuntimeWarning, stacklevel=2)
        return None
    return Candidate(partition, analyse(partition, options), between.again | own.again)


def _best(proposals: Proposals, options: PlanOptions, budget: Budget, proposal: Plan) -> Candidate:
    """The best partition for a budget, with a plan of the full search, unless a plan of the short one is better.

    `proposal`: a plan of PyTorch's partition for this budget in which groups may be computed again.
    """
    quick: Decide = partial(decide, options=options, quick=True)
    limits = forecast_of(proposal).limits
    best = proposals.within(limits, proposal, quick, partial(over, options=options))
    own = proposals.own
    if best is None:  # only a partition that computes again would have met it, and there is none
        best = Candidate(own.partition, quick(own.partition, budget=budget, analysed=own.plan))
        limits = best.forecast.limits
    if budget == AUTO:
        best, limits = _fast_enough(proposals, best, limits, proposal, quick, options)
    try:
        plan = decide(best.partition, options, budget=limits, analysed=best.plan)
    except BudgetError:  # what a tighter budget has found
        return best
    full = Candidate(best.partition, plan)
    if isinstance(options.budget, int) and options.budget:
        return full  # with the bytes that stay resident over all graphs, which plans for other budgets do not have
    return best_within([best, full], limits) or full


def _fast_enough(
    proposals: Proposals, best: Candidate, limits: Limits, proposal: Plan, quick: Decide, options: PlanOptions
) -> tuple[Candidate, Limits]:
    """For "auto": the best partition under the least limits, from those of the proposal on, that is as fast as it says.

    The proposal is; but what is computed again may take longer than its price.
    """
    own = forecast_of(proposal)
    for shares in (1, 2, 4):
        if best.forecast.seconds <= (1 + options.slowdown + TOLERANCE) * own.compute_s:
            return best, limits
        more = shares * (own.everything - own.floor) / SHARES
        limits = Limits(limits.memory + more, limits.kept + more)
        try:
            proposal = proposals.propose(quick, limits)
        except BudgetError:
            break
        best = proposals.within(limits, proposal, quick, partial(over, options=options)) or best
    return best, limits


def rewrite(partition: Partition, plan: Plan, options: PlanOptions, stages: Stages = _UNSEEN, about: str = "") -> None:
    """Put the nodes of the plan into both graphs. `about`: what the forward carries for reports."""
    host_tier = _device(partition).type != "cpu"
    warn(plan, options, host_tier=host_tier)  # first: if the rewrite fails, the user knows what was planned
    before = Before.of(partition)
    if plan.groups or kept_activations(partition):  # of outputs alone there is no group, and the report shows them
        insert(partition, plan, config=options.runtime_config, about=about)
        stages.after("insert", forward=partition.forward, backward=partition.backward)
        verify_graphs(partition, plan, before)


def finish(partition: Partition, stages: Stages = _UNSEEN) -> None:
    """The last passes, on both graphs."""
    for each in LAST:
        each(partition)
        stages.after(each.__name__, forward=partition.forward, backward=partition.backward)


def _may_cut_again(joint: Joint, options: PlanOptions) -> bool:
    return options.recompute and not _is_partitioned_once() and not joint.has_own_budget


def _is_partitioned_once() -> bool:
    """Whether a setting of PyTorch forbids several partitions of one graph.

    * The user has PyTorch recompute.
    * The ranks agree on what is saved: each partition exchanges it, so all ranks must make equally many.
    * PyTorch quantizes what is saved, and notes that in the graph.
    """
    quantizes = "activation_quantization_aten_pass" in inductor_config.post_grad_fusion_options
    return functorch_config.activation_memory_budget != 1 or ranks_agree() or quantizes


def ranks_agree() -> bool:
    """Whether the ranks exchange what they save, each time that they partition a graph with a collective."""
    return syncs_decisions()


def _machine(partition: Partition, options: PlanOptions) -> Machine:
    return options.rates or Machine.default(_device(partition), torch.get_num_threads())


def _device(partition: Partition) -> torch.device:
    """The device of the saved tensors; the CPU if none is elsewhere."""
    devices = [t.device for n in partition.saved if isinstance(t := n.meta.get("val"), torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _as_tuple(passes: Any) -> tuple[Any, ...]:
    """The user's passes. Inductor accepts one pass or, from torch 2.12 on, several."""
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, (list, tuple)) else (passes,)
