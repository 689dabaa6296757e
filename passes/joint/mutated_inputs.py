"""Inputs that the step changes (running statistics, counters, caches): the backward needs them as they were.

    before the cut    what is computed from them is saved, not computed again from what they have become
    behind the cut    what the backward reads of them itself is saved as a copy; what it writes into stays the input

Functional graphs hide both: the change comes last in the forward or behind it, and the backward runs after it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch.utils.checkpoint import CheckpointPolicy

from ssd_fx.passes.joint.stale_views import is_view, rejoin_views
from ssd_fx.passes.partition import COPIED, NOT_CHECKED, Partition, changed_inputs, storage_of, tensor_of, written


def save_what_reads_changed_inputs(graph: fx.Graph) -> None:
    """Tags all that a joint graph computes from inputs which the step changes, for PyTorch's min-cut would compute it
    again in the backward, from what they are then (tests/test_recompute.py; plain Inductor of torch 2.13 has wrong
    gradients there). What of them the backward reads itself is for `copy_changed_inputs`."""
    changed = changed_inputs(graph)
    for node in graph.nodes if changed else ():
        reads = any(_is_one_of(source, changed) for source in node.all_input_nodes)
        if reads and node.op == "call_function" and not _is_one_of(node, changed):
            items = [user for user in node.users if user.target is operator.getitem]
            for each in (node, *items):  # a checkpoint's policy is of both
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_one_of(node: fx.Node, storages: frozenset[int]) -> bool:
    """Whether it is one of them or a view of one, also where its metadata still knows a copy that Inductor took out."""
    while storage_of(node) not in storages:
        made_by = node.args[0] if node.target is operator.getitem else node
        if not isinstance(made_by, fx.Node) or not is_view(made_by) or not isinstance(made_by.args[0], fx.Node):
            return False
        node = made_by.args[0]
    return True


def copy_changed_inputs(partition: Partition) -> None:
    """Saves a copy of every input, or view of one, that the backward reads although the step changes it.

    A model makes that copy itself (`x.clone()`), for eager autograd would refuse it, and Inductor takes it out again.
    What the backward writes into goes on to be the input itself.
    """
    changed = changed_inputs(partition.forward.graph)
    stale = [n for n in dict.fromkeys(partition.saved) if _is_one_of(n, changed) and not written(n)]
    received = partition.bwd_placeholders
    copied = [_copy_saved(partition, n, received[n.name]) for n in stale if n.name in received]
    if any(copied):
        rejoin_views(partition.backward.graph)
        partition.recompile()


def _copy_saved(partition: Partition, node: fx.Node, received: fx.Node) -> bool:
    """Whether there is anything that reads it. The copy is the first of what is saved: the tensors that PyTorch hands
    over without a look at their versions, as this one may be, are the last."""
    tensor, backward = tensor_of(node), partition.backward.graph
    writers = _writers(received)
    readers = [user for user in received.users if user not in writers]
    if tensor is None or not readers:
        return False
    with backward.inserting_before(partition.bwd_placeholders[partition.saved[0].name]):
        placeholder = backward.placeholder(f"{node.name}_copied")
    copied = _copy(partition.forward.graph, node, placeholder.name, tensor)
    placeholder.meta = {**received.meta, "val": copied.meta["val"]}
    placeholder.meta.pop(NOT_CHECKED, None)
    _save(partition, copied, instead_of=None if writers else node)
    for reader in readers:
        reader.replace_input_with(received, placeholder)
    if not writers:
        backward.erase_node(received)
    return True


def _save(partition: Partition, copied: fx.Node, instead_of: fx.Node | None) -> None:
    output, first = partition.fwd_output, partition.num_fwd_outputs
    values, descs = list(output.args[0]), output.meta.get("desc")  # type: ignore[arg-type]
    gone = [i for i, v in enumerate(values) if i >= first and v is instead_of]
    output.args = ((*values[:first], copied, *(v for i, v in enumerate(values) if i >= first and i not in gone)),)
    if descs is not None:
        desc = SavedForBackwardsAOTOutput(len(values))
        rest = (d for i, d in enumerate(descs) if i >= first and i not in gone)
        output.meta["desc"] = type(descs)((*descs[:first], desc, *rest))


def _copy(forward: fx.Graph, node: fx.Node, name: str, tensor: torch.Tensor) -> fx.Node:
    last = forward.find_nodes(op="placeholder")[-1]
    with forward.inserting_after(last if node.op == "placeholder" else node):
        copied = forward.create_node("call_function", torch.ops.aten.clone.default, (node,), name=name)
    with torch.no_grad(), tensor.fake_mode:  # type: ignore[attr-defined]
        copied.meta = {"val": tensor.clone(), COPIED: True}
    return copied


def _writers(received: fx.Node) -> set[fx.Node]:
    """What in the backward writes into what it received, and views through which it does."""
    key, found = storage_of(received), set()
    for node in received.graph.nodes:
        work = [(node, target) for target in written(node) if storage_of(target) == key]
        while work:
            user, target = work.pop()
            found.add(user)
            work += [(target, source) for source in target.all_input_nodes if storage_of(source) == key]
    return found
