"""Saved tensors that are copies of other saved tensors: written once, copied again in the backward.

    sigmoid -> t -> clone        sigmoid and clone saved, two storages, the same elements
                                 => one group {base sigmoid, members sigmoid and clone}; clone(t(sigmoid)) again

The copy is an operator of the forward that changes layout and nothing else; it runs in the backward on the same
strides, so that its result is the same to the bit and in every stride.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ssd_fx.passes.groups import AliasGroup, Copy, Layout
from ssd_fx.passes.packing import span
from ssd_fx.passes.partition import Partition, storage_key, tensor_of

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten._to_copy.default)


def merge_copies(partition: Partition, groups: list[AliasGroup]) -> list[AliasGroup]:
    """The groups, those whose base is a copy of bytes in another one merged into that one."""
    nodes = {n.name: n for n in partition.forward.graph.nodes}
    plain = [nodes[g.base] for g in groups if _is_plain(g)]
    of_storage = {storage_key(n.meta["val"]): n.name for n in plain if n.op != "placeholder"}
    merged = {g.base: g for g in groups}
    for group in groups:  # in the order of production: a copy of a copy finds the first one merged already
        source = copied(nodes[group.base]) if _is_plain(group) else None
        name = of_storage.get(storage_key(source.meta["val"])) if source is not None else None
        into = merged.get(name) if name is not None else None  # None: that one is a copy itself
        if source is not None and into is not None and into.base != group.base:
            found = _merge(into, group, Layout.of(source.meta["val"]))
            if found is not None:
                merged[into.base] = found
                del merged[group.base]
    return list(merged.values())


def _is_plain(group: AliasGroup) -> bool:
    return not group.obstacle and group.pack is None and not group.is_hint


def _merge(into: AliasGroup, group: AliasGroup, source: Layout) -> AliasGroup | None:
    assert into.layout is not None
    assert group.layout is not None
    held = into.layout.dtype == source.dtype and span(source) <= into.layout.numel
    if not held or source.conj or source.neg or into.layout.device != source.device:
        return None
    members = tuple(replace(m, copy=Copy(group.base, source)) for m in group.members)
    return replace(
        into,
        members=(*into.members, *members),
        nbytes=into.nbytes + group.nbytes,
        needed_nbytes=into.stored_nbytes,
    )


def copied(node: fx.Node) -> fx.Node | None:
    """What a node is a copy of, element for element; None if it is no copy."""
    if node.target not in _COPIES or len(node.args) != 1 or set(node.kwargs) - {"memory_format", "dtype", "device"}:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    out, old = tensor_of(node), tensor_of(source)
    if out is None or old is None or storage_key(old) is None or (out.dtype, out.device) != (old.dtype, old.device):
        return None
    return source
