"""The pipeline: the passes in order, verified after every one."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ssd_fx.passes import dump, verify
from ssd_fx.passes.alias import DYNAMIC, alias
from ssd_fx.passes.costs import Machine, time
from ssd_fx.passes.insert import insert
from ssd_fx.passes.lifetime import lifetime
from ssd_fx.passes.partition import Partition, fingerprint
from ssd_fx.passes.plan import Plan, PlanPass
from ssd_fx.passes.schedule import schedule
from ssd_fx.passes.select import select


@dataclass(frozen=True)
class PlanOptions:
    """What the passes need to know; `runtime_config` is handed through to the nodes unread.

    `budget` is bytes (int), a share of the bytes that can leave (float) or "auto"; `min_bytes`, `prefetch` are bytes;
    `dump_dir` may be empty.
    """

    budget: int | float | str
    min_bytes: int
    prefetch: int
    machine: Machine | None
    runtime_config: str
    hand_over: bool
    dump_dir: str = ""


def plan_passes(options: PlanOptions, machine: Machine) -> tuple[PlanPass, ...]:
    return (
        alias,  # first: the alias group is the unit of everything that follows
        partial(time, machine=machine),  # before lifetimes, whose idle time is predicted time
        lifetime,
        partial(  # decides and places together, since what a choice costs depends on where its nodes can stand
            select, budget=options.budget, min_bytes=options.min_bytes, machine=machine, prefetch=options.prefetch
        ),
        schedule,  # from operators of the simulated step to nodes of the graphs
    )


def run(partition: Partition, options: PlanOptions, *, consume: bool) -> Plan:
    """Plan and rewrite `partition` in place; returns the plan. `consume`: the backward runs at most once."""
    machine = options.machine or Machine.default(_device(partition), torch.get_num_threads())
    plan = Plan(graph=fingerprint(partition))
    for decide in plan_passes(options, machine):
        plan = decide(partition, plan)
        verify.verify_plan(partition, plan)
    _tell_dynamic(plan, options)
    names = [[n.name for n in m.graph.nodes] for m in (partition.forward, partition.backward)]
    before = verify.Before.of(partition)
    if plan.groups:
        insert(partition, plan, config=options.runtime_config, hand_over=options.hand_over, consume=consume)
        verify.verify_graphs(partition, plan, before)
    if options.dump_dir:
        dump.write(Path(options.dump_dir), partition, plan, dump.table(plan, *names))
    return plan


def _tell_dynamic(plan: Plan, options: PlanOptions) -> None:
    """A fallback is loud: with dynamic shapes nothing leaves, and the memory that was to be free is not."""
    nbytes = sum(g.nbytes for g in plan.groups if g.obstacle == DYNAMIC and g.nbytes >= options.min_bytes)
    if nbytes:
        warnings.warn(
            f"ssd_fx keeps about {nbytes} B of graph {plan.graph} in memory, because shapes are dynamic: another "
            "batch size or length made torch compile again. Equal shapes (drop_last=True, padding) or "
            "torch.compile(dynamic=False), which compiles for every shape, let them leave.",
            RuntimeWarning,
            stacklevel=2,
        )


def _device(partition: Partition) -> torch.device:
    """The device of the saved tensors; the CPU where nothing is saved."""
    devices = [t.device for n in partition.saved if isinstance(t := n.meta.get("val"), torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
