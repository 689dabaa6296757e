"""Partitions of a joint graph that may be taken instead of PyTorch's own, or that proposals begin from.

PyTorch's min-cut makes each of them, with tags. `proposals.py` says which are made, and which is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ssd_fx.passes.decide import analyse
from ssd_fx.passes.joint.collectives import communication
from ssd_fx.passes.joint.compared import compared, compares_again
from ssd_fx.passes.joint.layers import between_layers, made_of, reproducible
from ssd_fx.passes.joint.recompute import CutError, Joint, may_run_twice
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import RECOMPUTED, Partition, storage_of
from ssd_fx.passes.plan import Limits, Plan, Recompute, replay_of
from ssd_fx.passes.schedule import Replay


@dataclass(frozen=True)
class Candidate:
    """A partition and its plan. `again`: names of the nodes that it computes again whatever a proposal asks for."""

    partition: Partition
    plan: Plan
    again: frozenset[str] = frozenset()

    @property
    def replay(self) -> Replay:
        return replay_of(self.plan)

    def is_within(self, limits: Limits) -> bool:
        found = self.replay
        return found.peak <= limits.memory and found.kept_bytes <= limits.kept and found.stays <= limits.stays


def cut_so(joint: Joint, first: Candidate, again: frozenset[str], proposal: Plan) -> Partition | None:
    """The partition whose backward computes the nodes `again`, as `proposal` asks; None if PyTorch cannot make it, or
    if it must not be used."""
    try:
        partition = joint.partition_again(again, proposal.saved_nodes)
    except CutError as error:
        text = f"ssd_fx computes nothing of graph {proposal.graph} again, for PyTorch cannot partition it so: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None
    return partition if _may_replace(first.partition, partition) else None


def _may_replace(first: Partition, partition: Partition) -> bool:
    """Whether a partition may be used instead of PyTorch's own.

    Other ranks may run PyTorch's own partition, `first`, and all must communicate in the same order. So `partition`
    must communicate like it. Its backward must not compare a tensor that it computes again. Nor may it read a tensor
    that the caller may change, unless the backward of `first` reads that too.
    """
    if communication(partition) != communication(first) or compares_again(partition):
        return False
    return partition.shared_with_caller <= first.shared_with_caller


def layered(joint: Joint, own: Candidate, options: PlanOptions) -> Candidate | None:
    """The partition that saves the tensors between layers; None if it cannot be made.

    Its plan has the facts of the analyses, and no decisions. Proposals begin from it, and it is never used as it is.
    """
    between, wanted = between_layers(own.partition), _wanted(own)
    if not between.saved:
        return None
    with _told(own, "layers"):
        again = between.again - wanted
        partition = joint.partition_again(again | own.again, between.saved | wanted)
        return _beginning(partition, again, own, own.plan.proposal, options)
    return None


def selective(joint: Joint, own: Candidate, first: Plan, options: PlanOptions) -> Candidate | None:
    """The partition that saves the results of library calls and tensors between layers, and computes most of the rest
    again, as a selective checkpoint of every layer does; None if it cannot be made, or must not be used.

    Its plan has the facts of the analyses. `first`: a plan of PyTorch's own partition, with prices.
    """
    graph, wanted = own.partition.forward.graph, between_layers(own.partition).saved | _wanted(own)
    made = {n.name for n in graph.nodes if n.op == "call_function"}
    maybe = made_of(made - own.partition.once(reproducible), own.partition) - wanted
    if not maybe:
        return None
    with _told(own, "products"):
        # PyTorch computes `anyway` again by itself. What it saves may be computed again too, if nothing compares it.
        exact = own.partition.once(compared)
        anyway = {n.name for n in own.partition.backward.graph.nodes} - exact
        maybe |= {n.name for n in own.partition.saved if may_run_twice(n)} & made - exact - wanted
        partition = joint.partition_again(own.again, wanted | (made - maybe - anyway), maybe)
        if not _may_replace(own.partition, partition):
            return None
        again = maybe & {n.name for n in partition.backward.graph.nodes if RECOMPUTED in n.meta}
        nodes = {n.name: n for n in graph.nodes}
        stay = {storage_of(n) for n in partition.saved}
        gone = [g.slot for g in first.groups if g.slot in first.prices and storage_of(nodes[g.base]) not in stay]
        proposal = first.with_(decisions={slot: Recompute(first.prices[slot].nodes) for slot in gone})
        return _beginning(partition, again, own, proposal, options)
    return None


def _wanted(own: Candidate) -> frozenset[str]:
    """Names of the nodes whose tensors the user wants kept or offloaded. They must be saved, not computed again."""
    nodes = {n.name: n for n in own.partition.forward.graph.nodes}
    marked = [g for g in own.plan.groups if g.slot in own.plan.marks and own.plan.marks[g.slot].decision != "recompute"]
    storages = {storage_of(nodes[group.base]) for group in marked}
    return frozenset(n.name for n in nodes.values() if n.op == "call_function" and storage_of(n) in storages)


def _beginning(
    partition: Partition, again: frozenset[str], own: Candidate, proposal: Plan | None, options: PlanOptions
) -> Candidate:
    """A partition that proposals begin from. `proposal`: the plan that asked for it."""
    found = analyse(partition, options).with_(proposal=proposal, own=own.plan.own)
    return Candidate(partition, found, again | own.again)


@contextmanager
def _told(own: Candidate, what: str) -> Iterator[None]:
    """Turn a `CutError` of the body into a warning. `what`: the partition that was to be cut, in words."""
    try:
        yield
    except CutError as error:
        text = f"ssd_fx begins no plan of graph {own.plan.graph} from its {what}, for PyTorch cannot partition it so: "
        warnings.warn(text + str(error), RuntimeWarning, stacklevel=2)
