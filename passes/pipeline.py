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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ssd_fx.passes import proposals
from ssd_fx.passes.alias.copies import merge_copies
from ssd_fx.passes.alias.storages import alias
from ssd_fx.passes.cost.lifetime import lifetime
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.roofline import time
from ssd_fx.passes.joint.compared import keep_compared
from ssd_fx.passes.joint.marks import LiftMarks, lift, mark
from ssd_fx.passes.joint.mutated_inputs import copy_changed_inputs, save_what_reads_changed_inputs
from ssd_fx.passes.joint.recompute import Joint, price
from ssd_fx.passes.joint.stale_views import rejoin_views
from ssd_fx.passes.notices import warn
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, fingerprint
from ssd_fx.passes.plan import Plan, PlanPass
from ssd_fx.passes.planner.select import AUTO, Budget, select
from ssd_fx.passes.proposals import Candidate
from ssd_fx.passes.rewrite.insert import insert
from ssd_fx.passes.rewrite.lite_mode import annotate_ours
from ssd_fx.passes.rewrite.refuse import refuse_stand_ins
from ssd_fx.passes.stages import Stages
from ssd_fx.passes.verify.graphs import verify_graphs
from ssd_fx.passes.verify.interface import Before
from ssd_fx.passes.verify.plan import verify_plan

_UNSEEN = Stages(on=False)

JOINT: tuple[Callable[[fx.Graph], None], ...] = (
    lift,  # first: marks are nodes that would hide patterns. Under Inductor they are gone already (inductor_passes)
    rejoin_views,  # corrects the metadata of views, which the next pass reads
    save_what_reads_changed_inputs,  # tags what the cut must save
)

AFTER_CUT: tuple[Callable[[Partition], None], ...] = (
    copy_changed_inputs,  # only the cut says what the backward reads of the inputs that the step changes
)


def analyses(options: PlanOptions, machine: Machine) -> tuple[PlanPass, ...]:
    return (
        alias,  # first: the alias group is the unit of everything that follows
        *([keep_compared] if options.lossy else []),  # before merge_copies, which passes over what has an obstacle
        partial(mark, keep=options.keep, offload=options.offload, roots=options.roots),  # marks groups, binds select
        merge_copies,  # after mark: a copy that is marked otherwise than its source stays a separate group
        partial(time, machine=machine),
        lifetime,
    )


def decisions(
    options: PlanOptions, machine: Machine, budget: Budget, *, priced: bool, host_tier: bool, quick: bool
) -> tuple[PlanPass, ...]:
    """`priced`, `quick`: as in `decide`; `host_tier`: as in `select`."""
    return (
        *([price] if priced else []),  # needs the groups and the times
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
    from ssd_fx.passes.lowering.order import KeepCommunication, PinOrder  # imports the scheduler

    return {
        # before Inductor's own patterns, which marks would hide
        "joint_custom_pre_pass": LiftMarks(version, _as_tuple(inductor_config.joint_custom_pre_pass)),
        "custom_partitioner_fn": partitioner,  # JOINT to LAST
        # before fusion, which could reverse operators that communicate
        "_pre_fusion_custom_pass": KeepCommunication(version, inductor_config._pre_fusion_custom_pass),
        # after fusion: makes the planned order the only one that later passes can choose
        "_post_fusion_custom_pass": PinOrder(version, inductor_config._post_fusion_custom_pass),
    }


def joint_of(
    gm: fx.GraphModule, inputs: Sequence[object], arguments: dict[str, Any], stages: Stages = _UNSEEN
) -> Joint:
    """The joint graph, ready to be cut; `inputs`, `arguments` are those of PyTorch's min-cut."""
    stages.after("joint", joint=gm)
    for each in JOINT:
        each(gm.graph)
        stages.after(each.__name__, joint=gm)
    return Joint(gm, inputs, arguments, AFTER_CUT)


def decide(
    partition: Partition,
    options: PlanOptions,
    *,
    budget: Budget | None = None,
    priced: bool = False,
    quick: bool = False,
    analysed: Plan | None = None,
) -> Plan:
    """A plan of `partition`, which does not change.

    `budget`: None for that of the options. `priced`: groups may be recomputed, which needs another partition. `quick`:
    with a short search. `analysed`: an earlier, unpriced plan of the partition, whose analyses are used.
    """
    plan = analysed.undecided() if analysed else analyse(partition, options)
    budget = options.budget if budget is None else budget
    host_tier = _device(partition).type != "cpu"
    machine = _machine(partition, options)
    passes = decisions(options, machine, budget, priced=priced, host_tier=host_tier, quick=quick)
    return _run(passes, partition, plan)


def analyse(partition: Partition, options: PlanOptions) -> Plan:
    """What the analyses find in `partition`, with nothing decided; no budget changes it."""
    plan = Plan(graph=fingerprint(partition, options.digest))
    return _run(analyses(options, _machine(partition, options)), partition, plan)


def _run(passes: Sequence[PlanPass], partition: Partition, plan: Plan) -> Plan:
    for pass_ in passes:
        plan = pass_(partition, plan)
        verify_plan(partition, plan)
    return plan


def decide_joint(joint: Joint, options: PlanOptions) -> tuple[Partition, Plan]:
    """The partition that is predicted to be fastest within the budget, and its plan."""
    return decide_cut(joint, cut(joint, options), options)


def cut(joint: Joint, options: PlanOptions) -> Candidate:
    """PyTorch's own partition, with what the analyses find in it: where the plan for any budget begins.

    Nothing is decided in its plan, so it has no forecast.
    """
    own = joint.partition(again=_may_cut_again(joint, options))
    return Candidate(own, analyse(own, options))


def decide_cut(joint: Joint, own: Candidate, options: PlanOptions) -> tuple[Partition, Plan]:
    """`decide_joint`, of a graph that is cut already. `own` does not change, so it serves one budget after the other.

    Plans of the short search compare the partitions. The fastest one gets a plan of the full search.
    """
    if not _may_cut_again(joint, options):
        return own.partition, decide(own.partition, options, analysed=own.plan)

    quick = partial(decide, options=options, quick=True)
    first = Candidate(own.partition, quick(own.partition, analysed=own.plan))
    best = proposals.fastest(joint, first, quick)
    if options.budget == AUTO:
        best = proposals.smallest(joint, first, best, quick, options.slowdown)
    found = best.forecast.limits  # what the short search kept to: "auto" need not search again
    return best.partition, decide(best.partition, options, budget=found, analysed=best.plan)


def rewrite(partition: Partition, plan: Plan, options: PlanOptions, stages: Stages = _UNSEEN, about: str = "") -> None:
    """Put the nodes of the plan into both graphs. `about`: what the forward carries for reports."""
    host_tier = _device(partition).type != "cpu"
    warn(plan, options, host_tier=host_tier)  # first: if the rewrite fails, the user knows what was planned
    before = Before.of(partition)
    if plan.groups:
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
    return bool(getattr(functorch_config, "_sync_decision_cross_ranks", False))


def _machine(partition: Partition, options: PlanOptions) -> Machine:
    return options.machine or Machine.default(_device(partition), torch.get_num_threads())


def _device(partition: Partition) -> torch.device:
    """The device of the saved tensors; the CPU if none is elsewhere."""
    devices = [t.device for n in partition.saved if isinstance(t := n.meta.get("val"), torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _as_tuple(passes: Any) -> tuple[Any, ...]:
    """The user's passes. Inductor accepts one pass or, from torch 2.12 on, several."""
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, (list, tuple)) else (passes,)
