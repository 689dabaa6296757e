"""A planner that computes again all that it can, whatever it gains: for what a second partition may do wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from ssd_fx.passes import proposals
from ssd_fx.passes.candidates import Candidate
from ssd_fx.passes.joint import recompute
from ssd_fx.passes.joint.layers import between_layers
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Limits, Plan, Recompute
from ssd_fx.passes.proposals import Proposals

# A machine (the option of that name) whose drive is so slow that recomputing pays.
SLOW = {"flops": 1e11, "memory_bw": 1e10, "write_bw": 2e7, "read_bw": 2e7, "latency_s": 1e-4}


def all_priced(partition: Partition, analysed: Plan, least: int = 0) -> Plan:
    """A plan in which every group of `least` bytes or more that has a price is computed again."""
    plan = recompute.price(partition, analysed)
    chosen = [group.slot for group in plan.groups if group.slot in plan.prices and group.nbytes >= least]
    return plan.with_(decisions={slot: Recompute(plan.prices[slot].nodes) for slot in chosen})


@contextmanager
def everything_recomputed(least: int = 0, *, by_layers: bool = False) -> Iterator[list[int]]:
    """Yields how many groups were, of every graph that was compiled since. `least`: as in `all_priced`.

    `by_layers`: what lies between layers is saved, where there are any, and all between is computed again.

    None were where a second partition was not made, or must not be used. No graph comes out of a cache, where no pass
    would run, and none goes into one, where others would find this plan.
    """
    decide, cut_so, improve_from = proposals.decide, proposals.cut_so, Proposals._improve
    groups = list[int]()

    def all_that_can(partition: Partition, options: Any, *, priced: bool = False, **more: Any) -> Plan:
        more.pop("budget", None)  # the limit of PyTorch's own partition, which small graphs exceed
        if not priced:
            return decide(partition, options, **more)
        plan = all_priced(partition, more["analysed"], least)
        if by_layers:
            stay = between_layers(partition).saved
            between = {g.slot for g in plan.groups if not stay.isdisjoint({g.base, *(m.name for m in g.members)})}
            plan = plan.with_(decisions={slot: d for slot, d in plan.decisions.items() if slot not in between})
        groups.append(len(plan.decisions))
        own = decide(partition, options, analysed=more["analysed"])
        return plan.with_(replay=own.replay, limits=own.limits, baseline=own.baseline)

    def counted(*args: Any) -> Partition | None:
        partition = cut_so(*args)
        if partition is None:
            groups[-1] = 0
        return partition

    def improve(self: Proposals, options: Any, limits: Limits, base: Candidate, *args: Any) -> None:
        if base is not self.own or self.layered is None:
            improve_from(self, options, limits, base, *args)

    def none(*_: object) -> None:
        return None

    def last(found: Sequence[Candidate], limits: Limits) -> Candidate:
        return found[-1]

    with (
        mock.patch.object(proposals, "decide", all_that_can),
        mock.patch.object(proposals, "GAIN", -math.inf),
        mock.patch.object(proposals, "_gains", lambda proposal, *_: bool(proposal.recomputed_nodes)),
        mock.patch.object(proposals, "ROUNDS", 1),
        mock.patch.object(proposals, "best_within", last),
        mock.patch.object(proposals, "cut_so", counted),
        mock.patch.object(Proposals, "_improve", improve),
        nullcontext() if by_layers else mock.patch.object(proposals, "layered", none),
        mock.patch.object(proposals, "selective", none),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield groups
