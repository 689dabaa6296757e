"""The pipeline: the passes in order, verified after every one."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from functools import partial

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from ssd_fx.passes.alias.copies import merge_copies
from ssd_fx.passes.alias.storages import DYNAMIC, NESTED, alias
from ssd_fx.passes.cost.lifetime import lifetime
from ssd_fx.passes.cost.profile import Profile
from ssd_fx.passes.cost.roofline import Machine, time
from ssd_fx.passes.joint.collectives import communication
from ssd_fx.passes.joint.marks import mark
from ssd_fx.passes.joint.recompute import Joint, price, recomputed
from ssd_fx.passes.partition import Partition, fingerprint
from ssd_fx.passes.plan import Limits, Plan, PlanPass, Prediction
from ssd_fx.passes.planner.schedule import schedule
from ssd_fx.passes.planner.select import Budget, select
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.rewrite.insert import insert
from ssd_fx.passes.verify.graphs import verify_graphs
from ssd_fx.passes.verify.interface import Before
from ssd_fx.passes.verify.plan import verify_plan

RECOMPUTE_ROUNDS = 3  # partitions that are tried beside PyTorch's own
GAIN = 5e-3  # the share of a step by which recomputing must be predicted to be faster: figures are coarse

log = logging.getLogger("ssd_fx")


@dataclass(frozen=True)
class PlanOptions:
    """What the passes need to know; `runtime_config` is handed through to the nodes unread.

    `version` is a digest of the package's source: compile caches look at it.
    `budget` is bytes (int), a share of the bytes that can leave (float) or "auto"; `min_bytes`, `prefetch` are bytes;
    `recompute`: whether tensors may be computed again instead. `host_budget` is bytes of host memory, which is a tier
    of its own only where the device has other memory. `keep` and `offload` are module name patterns, `roots` the
    expressions that module names begin behind; `annotations` is a digest of what the graph says beside its code, which
    caches do not look at. `machine`: None for typical rates. `profile`: measured times, of this graph or of others.
    """

    version: str
    budget: int | float | str
    min_bytes: int
    prefetch: int
    machine: Machine | None
    runtime_config: str
    hand_over: bool
    recompute: bool = False
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    annotations: str = ""
    profile: Profile | None = None
    host_budget: int = 0


def analyses(options: PlanOptions, machine: Machine) -> tuple[PlanPass, ...]:
    """What is found of a partition, whatever is decided."""
    return (
        alias,  # first: the alias group is the unit of everything that follows
        partial(mark, keep=options.keep, offload=options.offload, roots=options.roots),  # binds select, reads groups
        merge_copies,  # behind mark: a copy that is marked in its own right is decided upon by itself
        partial(time, machine=machine, profile=options.profile),  # before lifetimes, whose idle time is predicted time
        lifetime,
    )


def decisions(
    options: PlanOptions, machine: Machine, budget: Budget, *, priced: bool, host_tier: bool, quick: bool
) -> tuple[PlanPass, ...]:
    """`host_tier`: the graph computes on a device with memory of its own. `priced`, `quick`: as in `decide`."""
    tiered, resting = (options.host_budget, 0) if host_tier else (0, options.host_budget)
    return (
        *([price] if priced else []),  # needs the groups and the times
        partial(  # decides and places together, since what a choice costs depends on where its nodes can stand
            select,
            budget=budget,
            min_bytes=options.min_bytes,
            machine=machine,
            prefetch=options.prefetch,
            host_budget=tiered,
            resting=resting,
            shared=options.budget if isinstance(options.budget, int) else 0,
            quick=quick,
        ),
        schedule,  # from operators of the simulated step to nodes of the graphs
    )


def decide(
    partition: Partition,
    options: PlanOptions,
    *,
    budget: Budget | None = None,
    priced: bool = False,
    quick: bool = False,
    analysed: Plan | None = None,
) -> Plan:
    """Plan `partition` without changing it. `priced`: groups may be recomputed, which takes another partition.

    `quick`: with a short search. `analysed`: an earlier plan of the partition, unpriced, which is decided once more.
    """
    device = _device(partition)
    machine = options.machine or Machine.default(device, torch.get_num_threads())
    plan = analysed.undecided() if analysed else Plan(graph=fingerprint(partition))
    if options.profile is not None:
        machine = options.profile.machine(machine, plan.graph)
    budget, host_tier = options.budget if budget is None else budget, device.type != "cpu"
    passes = () if analysed else analyses(options, machine)
    passes += decisions(options, machine, budget, priced=priced, host_tier=host_tier, quick=quick)
    for pass_ in passes:
        plan = pass_(partition, plan)
        verify_plan(partition, plan)
    return plan


def decide_joint(joint: Joint, options: PlanOptions) -> tuple[Partition, Plan]:
    """The partition that is predicted to be fastest within the budget, and its plan.

    Partitions are compared by plans of the short search, and the plan of the best one is searched for with all effort.
    """
    if not options.recompute or _recomputes_already() or joint.has_own_budget:
        partition = joint.partition()
        return partition, decide(partition, options)
    partition, plan = _quick_joint(joint, options)
    assert plan.prediction is not None
    settled = decide(partition, options, budget=plan.prediction.limits, analysed=plan)
    return partition, settled


def _recomputes_already() -> bool:
    """Whether the user has PyTorch recompute, or the ranks agree on what is saved: then PyTorch exchanges that in every
    partition, and all ranks must make equally many. Or PyTorch quantizes what is saved, and notes so in the graph."""
    agree = getattr(functorch_config, "_sync_decision_cross_ranks", False)
    quantizes = "activation_quantization_aten_pass" in inductor_config.post_grad_fusion_options
    return functorch_config.activation_memory_budget != 1 or bool(agree) or quantizes


def _quick_joint(joint: Joint, options: PlanOptions) -> tuple[Partition, Plan]:
    """PyTorch's partition, or one that recomputes and is predicted to be faster, with a plan of the short search."""
    partition = joint.partition(again=True)
    plan = decide(partition, options, quick=True)
    assert plan.prediction is not None
    if not _could_gain(plan.prediction):
        return partition, plan
    first, analysed, limits, talk = partition, plan, plan.prediction.limits, communication(partition)
    best = first, analysed
    tight, tried = limits, {frozenset[str]()}
    for _ in range(RECOMPUTE_ROUNDS):
        try:
            priced = decide(first, options, budget=tight, priced=True, quick=True, analysed=analysed)
        except BudgetError:
            break
        if priced.recomputed_nodes in tried:
            break
        tried.add(priced.recomputed_nodes)
        try:
            partition = joint.partition_again(priced.recomputed_nodes, priced.saved_nodes)
        except RuntimeError as error:
            told = f"ssd_fx computes nothing of graph {plan.graph} again, for PyTorch cannot partition it so: {error}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
            break
        if communication(partition) != talk or not partition.lent <= first.lent:
            break
        try:
            plan = decide(partition, options, budget=limits, quick=True)
        except BudgetError as error:  # the chains need memory that their prices do not tell of
            missing = error.least - limits.memory
            if missing <= 0:  # it is not the floor that is above the limit: a tighter one need not help, a looser never
                break
            tight = Limits(tight.memory - missing, tight.kept)
            continue
        if _seconds(plan) < (1 - GAIN) * _seconds(best[1]):
            best = (partition, plan.with_(recomputed=recomputed(priced)))
        break
    return best


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.solution.outcome.seconds


def _could_gain(prediction: Prediction) -> bool:
    """Whether so much of the step is no compute that computing more could pay."""
    seconds = prediction.solution.outcome.seconds
    return seconds - sum(prediction.modelled.step.seconds) > GAIN * seconds


def rewrite(partition: Partition, plan: Plan, options: PlanOptions) -> None:
    """Put the nodes of the plan into both graphs."""
    _tell_kept(plan, options)
    _tell_full_host(plan)
    _tell_unprofiled(plan, options.profile)
    before = Before.of(partition)
    if plan.groups:
        insert(partition, plan, config=options.runtime_config, hand_over=options.hand_over)
        verify_graphs(partition, plan, before)


def _tell_kept(plan: Plan, options: PlanOptions) -> None:
    """A fallback is loud: what cannot leave for a reason that the user can change takes memory that was to be free."""
    for obstacle, text in _CHANGEABLE.items():
        nbytes = sum(g.nbytes for g in plan.groups if g.obstacle == obstacle and g.nbytes >= options.min_bytes)
        if nbytes:
            told = f"ssd_fx keeps about {nbytes} B of graph {plan.graph} in memory: {text}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)


_CHANGEABLE = {
    DYNAMIC: "shapes are dynamic, and what is stored cannot be told from the sizes that the backward knows. Equal "
    "shapes (drop_last=True, padding) or torch.compile(dynamic=False), which compiles for every shape, let them leave.",
    NESTED: "a nested region (torch.compiler.nested_compile_region) returns it, and PyTorch does not tell apart what "
    "its calls return. Without the region it leaves.",
}


def _tell_full_host(plan: Plan) -> None:
    """What was to go to host memory goes to the drive where that is full."""
    marked = {slot for slot, mark in plan.marks.items() if (mark.decision, mark.tier) == ("offload", "host")}
    full = [g for g in plan.offloaded if g.slot in marked and plan.tier(g.slot) == "ssd"]
    if full:
        listed = ", ".join(f"{g.base!r} ({g.stored_nbytes} B, {plan.marks[g.slot].reason})" for g in full)
        warnings.warn(
            f"ssd_fx has no room in host memory for what graph {plan.graph} was told to put there, which goes to the "
            f"drive: {listed}; host_budget would have to be larger",
            RuntimeWarning,
            stacklevel=2,
        )


def _tell_unprofiled(plan: Plan, profile: Profile | None) -> None:
    if profile is not None and profile.of(plan.graph) is None:
        log.info(
            "graph %s is not in the profile, whose graphs are %s: another model, or the same one cut otherwise, as "
            "after a change of the options. Its times are predicted, times %.3g, as the measured ones were longer",
            plan.graph,
            ", ".join(g.graph for g in profile.graphs),
            profile.scale,
        )


def _device(partition: Partition) -> torch.device:
    """The device of the saved tensors; the CPU where nothing is saved."""
    devices = [t.device for n in partition.saved if isinstance(t := n.meta.get("val"), torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
