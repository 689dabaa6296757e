"""Makes the plan of one partition: first the analyses run, then the decisions.

No pass changes the partition. Each returns the plan with more of its fields filled, and the verifier checks that plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from ssd_fx.passes.alias.channels import lay_out
from ssd_fx.passes.alias.copies import merge_copies
from ssd_fx.passes.alias.storages import alias
from ssd_fx.passes.cost.lifetime import lifetime
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.roofline import time
from ssd_fx.passes.joint.compared import keep_compared
from ssd_fx.passes.joint.marks import mark
from ssd_fx.passes.joint.recompute import price
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, fingerprint
from ssd_fx.passes.plan import Plan, PlanPass
from ssd_fx.passes.planner.budget import Budget
from ssd_fx.passes.planner.select import select
from ssd_fx.passes.verify.plan import verify_plan


def analyses(options: PlanOptions, machine: Machine) -> tuple[PlanPass, ...]:
    """The passes that find facts about a partition. No decision changes these facts."""
    return (
        alias,  # first: the alias group is the unit of everything that follows
        *([keep_compared] if options.lossy else []),  # before merge_copies, which skips groups with an obstacle
        partial(  # finds the marks that `select` must obey
            mark,
            keep=options.keep,
            offload=options.offload,
            roots=options.roots,
            policy=options.policy,
            min_bytes=options.min_bytes,
            recompute=options.recompute,
        ),
        merge_copies,  # after mark: a copy that is marked otherwise than its source stays a separate group
        *([lay_out] if options.inner == "inductor" else []),  # after merge_copies, which compares the graph's strides
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
    quick: bool,
) -> tuple[PlanPass, ...]:
    """The passes that decide what becomes of each alias group, and where its nodes go.

    `priced`, `saved`, `quick`: as in `decide`.
    """
    return (
        *([partial(price, saved=saved)] if priced else []),  # needs the groups and the times
        # decides and places together, since the cost of a decision depends on where its nodes can be
        partial(select, options=options, machine=machine, budget=budget, quick=quick),
    )


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
    """A plan of `partition`.

    `budget`: None takes that of the options. `priced`: groups may be recomputed, except those of the slots `saved`;
    such a plan asks for another partition. `quick`: the search is a short one. `analysed`: an earlier, unpriced plan of
    the partition; its analyses are used.

    Raises:
        BudgetError: no plan meets the budget.
    """
    plan = analysed.undecided() if analysed else analyse(partition, options)
    budget = options.budget if budget is None else budget
    machine = machine_of(partition, options)
    passes = decisions(options, machine, budget, priced=priced, saved=saved, quick=quick)
    return _run(passes, partition, plan)


def analyse(partition: Partition, options: PlanOptions) -> Plan:
    """The plan of `partition` after the analyses, with nothing decided. It does not depend on the budget."""
    plan = Plan(graph=fingerprint(partition, options.chosen))
    return _run(analyses(options, machine_of(partition, options)), partition, plan)


def _run(passes: Sequence[PlanPass], partition: Partition, plan: Plan) -> Plan:
    for pass_ in passes:
        plan = pass_(partition, plan)
        verify_plan(partition, plan)
    return plan


def machine_of(partition: Partition, options: PlanOptions) -> Machine:
    return options.rates or Machine.default(partition.device, torch.get_num_threads())
