"""Images that Inductor lays out with their channels last are stored and loaded that way.

    conv -> relu -> conv      FX: strides of relu (C*H*W, H*W, W, 1)      Inductor: (C*H*W, 1, W*C, C)
    store(relu)               asks for Inductor's strides, and so does the load

Inductor chooses these strides for the images that convolutions read and write, also if they are saved. A store that
asked for the strides of the FX graph would get a copy, beside the tensor that the next convolution reads, and the
backward would copy the loaded tensor once more. With Inductor's strides it gets the tensor as if it was kept.

Hazard: the backward was traced with the FX strides. Most nodes do not mind: Inductor makes a reshape of every view and
infers all strides again, since kept tensors have other strides too. But `as_strided` counts elements of the storage,
and operators of other libraries may read memory as it lies. So a group keeps the strides of the FX graph if such an
operator could see it, or if a member is not the whole base.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from ssd_fx.compat import OpOverload
from ssd_fx.passes.alias.packing import is_dense
from ssd_fx.passes.groups import AliasGroup, Layout, channels_last_strides, is_channels_last
from ssd_fx.passes.joint.conv_operands import lays_out
from ssd_fx.passes.partition import Partition, calls_ours, nodes_by_storage, storage_of, tensor_of, tensors_of
from ssd_fx.passes.plan import Plan

aten = torch.ops.aten

_OWN = ("aten", "prims")
# Operators that see where elements lie: by their places in the storage, or as bytes that follow each other.
_BY_PLACE = (
    *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "resize", "resize_", "resize_as"),
    *("resize_as_", "set_", "_unsafe_view"),
)


def channels_last(partition: Partition) -> frozenset[str]:
    """The nodes of the forward that Inductor lays out with their channels last; for `Partition.once`.

    Inductor's own function says so, which it calls when it lowers the graph.
    """
    if not lays_out(partition):
        return frozenset()
    from ssd_fx.compat.inductor import prefer_channels_last  # here, as it imports Inductor's compiler

    return frozenset(n.name for n in prefer_channels_last(partition.forward) if _is_image(n))


def lay_out(partition: Partition, plan: Plan) -> Plan:
    """Give the groups that Inductor lays out with their channels last such strides. Runs after `merge_copies`, which
    compares strides of the graph."""
    chosen = partition.once(channels_last)
    if not chosen:
        return plan
    forward = {n.name: n for n in partition.forward.graph.nodes}
    same = nodes_by_storage(forward.values())
    received = partition.bwd_placeholders
    in_place = _needed_in_place(partition.backward.graph)

    def laid_out(group: AliasGroup) -> AliasGroup:
        if group.base not in chosen or not _is_whole(group):
            return group
        base = forward[group.base]
        key = storage_of(base)
        assert key is not None, "a base has a storage"
        seen = (*same[key], *(received[m.name] for m in group.members))
        if base.op == "placeholder" or not in_place.isdisjoint(seen) or not all(map(_is_safe, _readers(seen))):
            return group
        layout = replace(group.stored, stride=channels_last_strides(group.stored.size))
        return replace(group, layout=layout, members=tuple(replace(m, layout=layout) for m in group.members))

    return plan.with_(groups=tuple(map(laid_out, plan.groups)))


def is_laid_out(group: AliasGroup, base: fx.Node) -> bool:
    """Whether a group is stored with other strides than its base has in the graph."""
    tensor = tensor_of(base)
    assert tensor is not None
    return group.pack is None and not statically_known_true(sym_eq(tuple(tensor.stride()), group.stored.stride))


def _is_image(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.ndim == 4


def _is_whole(group: AliasGroup) -> bool:
    """Whether every member of a group is its whole base, which is dense and in another order than channels last."""
    if group.obstacle or group.pack is not None or group.stored.dtype.is_complex or not is_dense(group.stored):
        return False
    if any(m.copy is not None or not _is_alike(m.layout, group.stored) for m in group.members):
        return False
    return not is_channels_last(group.stored.size, group.stored.stride)


def _is_alike(a: Layout, b: Layout) -> bool:
    alike = (a.dtype, a.device, a.conj, a.neg) == (b.dtype, b.device, b.conj, b.neg)
    return alike and bool(statically_known_true(sym_eq(a.numbers, b.numbers)))


def _readers(nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
    """The nodes that read `nodes`, directly or through views."""
    work = list(nodes)
    seen = set(work)
    while work:
        for user in work.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if user.op != "output":
                yield user
            if user.target is operator.getitem or (isinstance(user.target, OpOverload) and user.target.is_view):
                work.append(user)


def _needed_in_place(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that see where elements lie, and all nodes that they are computed from: these keep their strides."""
    work = [n for n in graph.nodes if not _sees_values(n)]
    found = set(work)
    while work:
        new = set(work.pop().all_input_nodes) - found
        found |= new
        work += new
    return found


def _is_safe(reader: fx.Node) -> bool:
    """Whether an operator depends on an image's values, not on where they lie, and does not write into the image."""
    mutable = isinstance(reader.target, OpOverload) and reader.target._schema.is_mutable
    return _sees_values(reader) and (not mutable or calls_ours(reader))


def _sees_values(node: fx.Node) -> bool:
    """Whether the values that a node computes depend on those that it reads, and not on where they lie."""
    if node.op != "call_function" or node.target is operator.getitem or calls_ours(node):
        return True
    if not isinstance(node.target, OpOverload):
        return not tensors_of(node)  # arithmetic of sizes
    if node.target.namespace not in _OWN or node.target is aten.view.dtype:
        return False
    return node.target.overloadpacket.__name__ not in _BY_PLACE
