"""Inputs that the step changes, such as running statistics, counters and caches. The backward needs their old values.

    forward    y = exp(x); z = mul(x, w); x_new = add(x, 1)      x_new is written into x after the forward
    backward   reads y, and x itself (for the gradient of w)

    before the cut    y is tagged MUST_SAVE                      min-cut would compute it again, from x_new
    after the cut     x_copied = clone(x) is saved, not x        the backward reads x_copied

A functional graph hides this hazard: it writes the input last, and the backward runs after that write.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ssd_fx.compat import SavedForBackwardsAOTOutput
from ssd_fx.passes.joint.stale_views import is_view, rejoin_views
from ssd_fx.passes.partition import COPIED, NOT_CHECKED, Partition, changed_inputs, storage_of, tensor_of, written


def save_what_reads_changed_inputs(graph: fx.Graph) -> None:
    """Tag everything that a joint graph computes from changed inputs with MUST_SAVE.

    PyTorch's min-cut may otherwise compute it again in the backward, from the new values (tests/test_recompute.py).
    Plain Inductor of torch 2.13 returns wrong gradients there. `copy_changed_inputs` sees to the inputs themselves.
    """
    changed = changed_inputs(graph)
    if not changed:
        return
    for node in graph.nodes:
        if node.op != "call_function" or _is_in(node, changed):
            continue
        if any(_is_in(source, changed) for source in node.all_input_nodes):
            items = [user for user in node.users if user.target is operator.getitem]
            for each in (node, *items):  # a checkpoint's policy tags both
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _is_in(node: fx.Node, storages: frozenset[int]) -> bool:
    """Whether a node's tensor lies in one of `storages`, by its metadata or as a view of a node that does.

    Metadata alone do not say it: they may still name the storage of a copy that Inductor took out.
    """
    while storage_of(node) not in storages:
        made_by = node.args[0] if node.target is operator.getitem else node
        if not isinstance(made_by, fx.Node) or not is_view(made_by) or not isinstance(made_by.args[0], fx.Node):
            return False
        node = made_by.args[0]
    return True


def copy_changed_inputs(partition: Partition) -> None:
    """Save a copy of each changed input, or view of one, that the backward reads.

    A model must copy such an input itself (`x.clone()`), or eager autograd raises an error. But Inductor takes that
    copy out of the graph. Where the backward writes into the input, it still gets the input itself.
    """
    changed = changed_inputs(partition.forward.graph)
    received = partition.bwd_placeholders
    paired = [n for n in dict.fromkeys(partition.saved) if n.name in received and tensor_of(n) is not None]
    stale = [n for n in paired if _is_in(n, changed) and not written(n)]
    read = [n for n in stale if received[n.name].users.keys() - _writers(received[n.name])]
    for node in read:
        _save_copy(partition, node, received[node.name])
    if read:
        rejoin_views(partition.backward.graph)
        partition.recompile()


def _save_copy(partition: Partition, node: fx.Node, received: fx.Node) -> None:
    """Save a copy of `node`, and pass it to all that read `received`, the placeholder of `node` in the backward.

    `received` remains only if the backward writes into it.

    Hazard: the copy must come first among the saved tensors. PyTorch passes the last of them to the backward without
    a check of their versions, and `node` may be one of those.
    """
    backward = partition.backward.graph
    writers = _writers(received)
    with backward.inserting_before(partition.bwd_placeholders[partition.saved[0].name]):
        placeholder = backward.placeholder(f"{node.name}_copied")
    copied = _copy(partition.forward.graph, node, placeholder.name)
    placeholder.meta = {**received.meta, "val": copied.meta["val"]}
    placeholder.meta.pop(NOT_CHECKED, None)
    _save_first(partition, copied, instead_of=None if writers else node)
    for reader in [user for user in received.users if user not in writers]:
        reader.replace_input_with(received, placeholder)
    if not writers:
        backward.erase_node(received)


def _save_first(partition: Partition, copied: fx.Node, instead_of: fx.Node | None) -> None:
    """Make `copied` the first saved tensor. `instead_of` is saved no longer."""
    output = partition.fwd_output
    first = partition.num_fwd_outputs
    values = list(output.args[0])  # type: ignore[arg-type]
    gone = [i for i, value in enumerate(values) if i >= first and value is instead_of is not None]

    def replaced(items: Sequence[Any], new: Any) -> tuple[Any, ...]:
        rest = [item for i, item in enumerate(items) if i >= first and i not in gone]
        return (*items[:first], new, *rest)

    output.args = (replaced(values, copied),)
    descs = output.meta.get("desc")
    if descs is not None:
        numbers = [desc.idx for desc in descs if isinstance(desc, SavedForBackwardsAOTOutput)]
        new = SavedForBackwardsAOTOutput(max(numbers, default=-1) + 1)
        output.meta["desc"] = type(descs)(replaced(descs, new))


def _copy(forward: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    """A clone of `node`, right after it, or after the last input if it is one."""
    tensor = node.meta["val"]
    last = forward.find_nodes(op="placeholder")[-1]
    with forward.inserting_after(last if node.op == "placeholder" else node):
        copied = forward.create_node("call_function", torch.ops.aten.clone.default, (node,), name=name)
    with torch.no_grad(), tensor.fake_mode:
        copied.meta = {"val": tensor.clone(), COPIED: True}
    return copied


def _writers(received: fx.Node) -> set[fx.Node]:
    """The nodes that write into a placeholder of the backward, and the views through which they do."""
    key = storage_of(received)
    found = set()
    for node in received.graph.nodes:
        work = [(node, target) for target in written(node) if storage_of(target) == key]
        while work:
            user, target = work.pop()
            found.add(user)
            work += [(target, source) for source in target.all_input_nodes if storage_of(source) == key]
    return found
