"""Inputs that the step changes (running statistics, counters, caches): the backward needs them as they were.

    before the cut    what is computed from them is saved, not computed again from what they have become
    behind the cut    what is saved of them itself is saved as a copy

Functional graphs hide both: the change is a copy_ at the end of the forward, and the backward runs after it.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ssd_fx.passes.partition import COPIED, Partition, changed_inputs, storage_of, tensor_of, written
from ssd_fx.passes.rejoin import rejoin_views


def save_what_reads_changed_inputs(graph: fx.Graph) -> None:
    """Tags all that a joint graph computes from inputs which the step changes, for PyTorch's min-cut would compute it
    again in the backward, from what they are then (tests/test_recompute.py; plain Inductor of torch 2.13 has wrong
    gradients there). What of them the backward reads itself is for `copy_changed_inputs`."""
    changed = changed_inputs(graph)
    for node in graph.nodes if changed else ():
        reads = any(storage_of(source) in changed for source in node.all_input_nodes)
        if reads and node.op == "call_function" and storage_of(node) not in changed:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def copy_changed_inputs(partition: Partition) -> None:
    """Saves a copy in the place of every input, or view of one, that is saved although the step changes it.

    A model makes that copy itself (`x.clone()`), for eager autograd would refuse it, and Inductor takes it out again.
    """
    changed = changed_inputs(partition.forward.graph)
    stale = [n for n in dict.fromkeys(partition.saved) if storage_of(n) in changed and not written(n)]
    for node in stale:
        _copy_saved(partition, node)
    if stale:
        rejoin_views(partition.backward.graph)
        partition.recompile()


def _copy_saved(partition: Partition, node: fx.Node) -> None:
    forward, backward = partition.forward.graph, partition.backward.graph
    received, output = partition.bwd_placeholders.get(node.name), partition.fwd_output
    tensor = tensor_of(node)
    if received is None or tensor is None:
        return  # the backward does not get it, and so cannot read it
    last = forward.find_nodes(op="placeholder")[-1]
    with forward.inserting_after(last if node.op == "placeholder" else node):
        name = f"{node.name}_copied"
        copied = forward.create_node("call_function", torch.ops.aten.clone.default, (node,), name=name)
    with torch.no_grad(), tensor.fake_mode:  # type: ignore[attr-defined]
        copied.meta = {"val": tensor.clone(), COPIED: True}
    first = partition.num_fwd_outputs
    values = output.args[0]
    assert isinstance(values, (list, tuple))
    output.args = ((*values[:first], *(copied if v is node else v for v in values[first:])),)
    with backward.inserting_before(received):
        placeholder = backward.placeholder(copied.name)
    placeholder.meta = {**received.meta, "val": copied.meta["val"]}
    received.replace_all_uses_with(placeholder)
    backward.erase_node(received)
