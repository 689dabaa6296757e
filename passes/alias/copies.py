"""Saved tensors that are copies of other saved tensors: written once, copied again in the backward.

    sigmoid -> t -> clone        sigmoid and clone saved, two storages, the same elements
                                 => one group {base sigmoid, members sigmoid and clone}; clone(t(sigmoid)) again
    sigmoid -> t -> clone -> view -> t -> clone_1        a copy of a copy, whether or not that is saved
                                 => clone_1 too; clone(t(view(clone(t(sigmoid))))) again

The copy is an operator of the forward that changes layout and nothing else; it runs in the backward on the same
strides, so that its result is the same to the bit and in every stride. Compiled, it may be no tensor of its own but
what its readers compute of the source, in the order of the source: where a reader would add up in another order, the
copy is a group of its own. So is one that somebody marked otherwise than its source. Of a chain, what is in between is
in memory too while the next copy is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ssd_fx.passes.alias.packing import is_dense, may_restride, span
from ssd_fx.passes.alias.storages import untrusted
from ssd_fx.passes.groups import AliasGroup, Copy, Layout
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_key, storage_of, tensor_of, written
from ssd_fx.passes.plan import Plan

aten = torch.ops.aten
COPIES = (aten.clone.default, aten._to_copy.default)


def merge_copies(partition: Partition, plan: Plan) -> Plan:
    """The groups whose base is a copy of bytes in another one, merged into that one."""
    origins, placeholders = _Origins.of(partition, plan.groups), partition.bwd_placeholders
    merged = {g.base: g for g in plan.groups}
    for group in plan.groups:  # in the order of production: what is copied comes first
        if not _is_plain(group) or not may_restride([placeholders[m.name] for m in group.members]):
            continue
        found = origins.find(group.base)
        if found is not None and plan.marks.get(merged[found[0]].slot) == plan.marks.get(group.slot):
            name, copy = found
            origins.put(group.base, name, copy)
            merged[name] = _merge(merged[name], group, copy)
            del merged[group.base]
    old = [g.slot for g in merged.values()]
    return plan.with_(
        groups=tuple(replace(g, slot=slot) for slot, g in enumerate(merged.values())),
        marks={new: plan.marks[slot] for new, slot in enumerate(old) if slot in plan.marks},
        modules={new: plan.modules[slot] for new, slot in enumerate(old) if slot in plan.modules},
    )


def copied(node: fx.Node) -> fx.Node | None:
    """What a node is a copy of, element for element; None if it is no copy, and where sizes are symbolic."""
    source = _copied_argument(node)
    if not isinstance(source, fx.Node):
        return None
    out, old = tensor_of(node), tensor_of(source)
    if out is None or old is None or storage_key(out) is None or storage_key(old) is None:
        return None
    if Layout.of(out).is_symbolic or Layout.of(old).is_symbolic:
        return None
    alike = (out.dtype, out.device, out.shape) == (old.dtype, old.device, old.shape)
    return source if alike and (node.target in COPIES or out.is_contiguous()) else None


def again(node: fx.Node) -> tuple[torch._ops.OpOverload, Mapping[str, object]]:
    """The operator that makes a copy of what `node` copies, and its keyword arguments."""
    if node.target in COPIES:
        return node.target, node.kwargs
    return aten.clone.default, {"memory_format": torch.contiguous_format}


def _copied_argument(node: fx.Node) -> object:
    """The argument whose elements are those of the result, but for their dtype, device and number."""
    if node.target in COPIES:
        plain = len(node.args) == 1 and not set(node.kwargs) - {"memory_format", "dtype", "device"}
        return node.args[0] if plain else None
    if node.target is aten.copy.default and not node.kwargs:  # into a new tensor, as functionalization leaves it
        return node.args[1] if len(node.args) == 2 else None
    if node.target is aten.repeat.default:  # of which nothing is repeated, where the sizes are the same
        return node.args[0]
    if node.target is aten.cat.default and isinstance(node.args[0], (list, tuple)):
        return node.args[0][0] if len(node.args[0]) == 1 else None
    return None


def _is_plain(group: AliasGroup) -> bool:
    return not group.obstacle and group.pack is None and not group.is_hint


def _merge(into: AliasGroup, group: AliasGroup, copy: Copy) -> AliasGroup:
    members = tuple(replace(m, copy=copy) for m in group.members)
    return replace(
        into,
        members=(*into.members, *members),
        nbytes=into.nbytes + group.nbytes,
        needed_nbytes=into.stored_nbytes,
    )


@dataclass
class _Origins:
    """`nodes`: of the forward, by name; `owners`: the node that each storage comes from; `closed`: storages that an
    operator writes into, or that metadata tells wrong things of; `found`: by storage, the group that holds its bytes,
    and as which copy of them (None: they are the base's own)."""

    nodes: dict[str, fx.Node]
    owners: dict[int, fx.Node]
    closed: set[int]
    found: dict[int, tuple[str, Copy | None]]

    @staticmethod
    def of(partition: Partition, groups: Iterable[AliasGroup]) -> _Origins:
        nodes = {n.name: n for n in partition.forward.graph.nodes}
        plain = [nodes[g.base] for g in groups if _is_plain(g)]
        changed = set(nodes_by_storage(target for n in nodes.values() for target in written(n)))
        return _Origins(
            nodes,
            {key: same[0] for key, same in nodes_by_storage(nodes.values()).items()},
            changed | untrusted(partition),
            {storage_key(n.meta["val"]): (n.name, None) for n in plain if n.op != "placeholder"},  # type: ignore[misc]
        )

    def find(self, name: str) -> tuple[str, Copy] | None:
        """The base of the group that the storage of a node is a copy of bytes of, and which."""
        node = self.nodes[name]
        source = copied(node)
        key = storage_of(source) if source is not None else None
        if source is None or key is None or key == storage_of(node):
            return None
        owner, layout = self.owners[key], Layout.of(source.meta["val"])
        if not _holds(Layout.of(owner.meta["val"]), layout):
            return None
        if key not in self.found:
            further = self.find(owner.name) if key not in self.closed else None
            if further is None:
                return None
            self.put(owner.name, *further)
        base, of = self.found[key]
        return base, Copy(node.name, layout, of)

    def put(self, name: str, base: str, copy: Copy) -> None:
        """The storage of a node is such a copy of bytes of the group of `base`."""
        key = storage_of(self.nodes[name])
        assert key is not None, "copies have a storage"
        self.found[key] = base, copy


def _holds(held: Layout, source: Layout) -> bool:
    """Whether a tensor of layout `held`, which is all of its storage, has the elements of `source`."""
    if held.is_symbolic or held.offset or not is_dense(held) or held.dtype != source.dtype:
        return False
    lazy = source.conj or source.neg or held.conj or held.neg
    return not lazy and held.device == source.device and span(source) <= held.numel
