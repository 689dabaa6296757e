"""Let a backward that was meant for kept activations refuse a stand-in."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ssd_fx.passes.partition import Partition, storage_of
from ssd_fx.passes.rewrite import rebuild

ops = torch.ops.ssd_fx


def refuse_stand_ins(partition: Partition) -> None:
    """Let the backward begin with a node that raises an error if a kept activation is a stand-in.

    Hazard: a checkpoint may run the forward again as another graph, whose stand-ins then reach this backward. Without
    the node it would compute with them.
    """
    graph = partition.backward.graph
    read = kept_activations(partition)
    if not read:
        return
    with graph.inserting_before(rebuild.first_compute(list(graph.nodes))):
        graph.call_function(ops.refuse_stand_ins.default, (read,)).meta["val"] = None
    partition.recompile()


def kept_activations(partition: Partition) -> list[fx.Node]:
    """The inputs of the backward that are kept activations, and that it reads."""
    placeholders = partition.bwd_placeholders
    received = [placeholders[n.name] for n in partition.saved if _is_kept(n, partition) and n.name in placeholders]
    return [placeholder for placeholder in received if placeholder.users]


def _is_kept(node: fx.Node, partition: Partition) -> bool:
    """Whether a saved node is a kept activation: no handle or stand-in of ours, no parameter and no buffer.

    What has no storage, such as a sparse tensor, does not count, because a stand-in has one. Nor does a result of a
    nested region: it may be a handle, which the region's forward saves for its backward.
    """
    if storage_of(node) is None or node.target in (ops.store.default, ops.stand_in.default):
        return False
    if node.op == "placeholder":
        return node.name in (partition.activations or ())
    made_by = node.args[0] if node.target is operator.getitem else node
    return not isinstance(made_by, fx.Node) or made_by.target is not torch.ops.higher_order.invoke_subgraph
