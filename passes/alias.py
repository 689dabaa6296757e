"""Saved tensors -> alias groups, by the storage of their FakeTensors.

    relu -> view -> mm          relu and view saved, one storage
    relu -> sin                 => one group {base relu, members relu and view}; one write, one read, the view replayed

Never offloaded, because they live anyway: parameters, buffers, constants, outputs, and views of any of them. Other
inputs (the hidden state that one compiled block hands to the next) are: whether their owner lets go of them is
seen at run time. One that the graph writes into stays.
"""

from __future__ import annotations

import torch
from torch import fx

from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_key, tensor_of
from ssd_fx.passes.plan import AliasGroup, Layout, Member, Plan

DYNAMIC = "dynamic shape"


def alias(partition: Partition, plan: Plan) -> Plan:
    """Fill `plan.groups`, in the order in which the storages are produced."""
    forward = list(partition.forward.graph.nodes)
    position = {n: i for i, n in enumerate(forward)}
    owners = {key: nodes[0] for key, nodes in nodes_by_storage(forward).items()}
    live = _live_anyway(forward, partition)
    disputed = _disputed(forward)
    saved = nodes_by_storage(n for n in dict.fromkeys(partition.saved))
    placeholders = partition.bwd_placeholders
    keys = sorted((key for key in saved if key not in live), key=lambda key: position[owners[key]])
    inputs = nodes_by_storage(n for n in forward if n.op == "placeholder")
    groups = []
    for slot, key in enumerate(keys):
        obstacle = "aliases disagree" if key in disputed else _obstacle(owners[key], saved[key])
        obstacle = obstacle or _input_obstacle(inputs.get(key, []), saved[key])
        if any(n.name not in placeholders for n in saved[key]):
            obstacle = "not an input of the backward"
        groups.append(_group(slot, owners[key], saved[key], obstacle))
    return plan.with_(groups=tuple(groups))


def _group(slot: int, owner: fx.Node, saved: list[fx.Node], obstacle: str) -> AliasGroup:
    tensor = tensor_of(owner)
    assert tensor is not None
    nbytes = tensor.untyped_storage().nbytes()
    if obstacle:  # sizes may be symbolic: nothing may be computed with them but a hint for the report
        return AliasGroup(
            slot, owner.name, None, tuple(Member(n.name, _NO_LAYOUT) for n in saved), _hint(nbytes), obstacle
        )
    members = tuple(Member(n.name, Layout.of(n.meta["val"])) for n in saved)
    return AliasGroup(slot, owner.name, Layout.of(tensor), members, int(nbytes))


_NO_LAYOUT = Layout((), (), 0, torch.uint8, torch.device("meta"))


def _hint(nbytes: int | torch.SymInt) -> int:
    if isinstance(nbytes, int):
        return nbytes
    hint = nbytes.node.hint  # None where the size depends on data
    return int(hint) if hint is not None else 0


def _live_anyway(forward: list[fx.Node], partition: Partition) -> set[int]:
    held = [n for n in forward if n.op == "placeholder" and n.name not in partition.activations]
    held += [n for n in forward if n.op == "get_attr"] + partition.kept_outputs
    return set(nodes_by_storage([*held, *_written(forward)]))


def _written(forward: list[fx.Node]) -> list[fx.Node]:
    """What an operator of the forward writes into."""
    written = []
    for node in forward:
        if isinstance(node.target, torch._ops.OpOverload):
            for arg, info in zip(node.args, node.target._schema.arguments, strict=False):
                if isinstance(arg, fx.Node) and info.alias_info is not None and info.alias_info.is_write:
                    written.append(arg)
    return written


def _disputed(forward: list[fx.Node]) -> set[int]:
    """Storages of nodes whose operator says "view of my input" while their FakeTensors do not share a storage.

    Passes that run before the partitioner may leave such metadata behind; what they alias is then unknown.
    """
    disputed: set[int] = set()
    for node in forward:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        out = tensor_of(node)
        for arg, info in zip(node.args, node.target._schema.arguments, strict=False):
            if out is None or info.alias_info is None or not isinstance(arg, fx.Node):
                continue
            source = tensor_of(arg)
            keys = {storage_key(out), storage_key(source) if source is not None else None}
            if len(keys) > 1 and any(r.alias_info is not None for r in node.target._schema.returns):
                disputed |= {k for k in keys if k is not None}
    return disputed


def _obstacle(owner: fx.Node, saved: list[fx.Node]) -> str:
    """Why the group cannot be offloaded; empty if it can."""
    base = tensor_of(owner)
    assert base is not None
    tensors = [n.meta["val"] for n in saved]
    if any(_is_symbolic(t) for t in (base, *tensors)):
        return DYNAMIC
    if base.storage_offset() != 0 or base.numel() * base.itemsize != base.untyped_storage().nbytes():
        return "no node covers the storage"
    if not _is_dense(base):
        return "not dense"
    if any(t.dtype != base.dtype for t in tensors):
        return "viewed as another dtype"
    if any(t.is_conj() or t.is_neg() for t in (base, *tensors)):
        return "lazy conjugate or negation"
    if base.numel() == 0:
        return "empty"
    return ""


def _input_obstacle(inputs: list[fx.Node], saved: list[fx.Node]) -> str:
    """Why a group that holds inputs of the graph cannot be offloaded; empty if it can.

    That two inputs share a storage is true of the call that was compiled and guarded by nobody. And what autograd saves
    without a version check, the backward sees as it is then, changed in place or not.
    """
    if len(inputs) > 1:
        return "inputs that alias"
    if inputs and any(n.meta.get("saved_tensor_with_no_vc_check") for n in saved):
        return "saved without a version check"
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_symbolic(tensor: torch.Tensor) -> bool:
    parts = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(p, torch.SymInt) for p in parts)
