"""Saved tensors that are copies of other saved tensors: stored once, copied again in the backward.

    sigmoid -> t -> clone        sigmoid and clone saved, two storages, the same elements
                                 => one group {base sigmoid, members sigmoid and clone}
                                    the backward runs clone(t(sigmoid))
    sigmoid -> t -> clone -> view -> t -> clone_1        clone_1 is a copy of a copy, which need not be saved
                                 => clone_1 is a member too
                                    the backward runs clone(t(view(clone(t(sigmoid)))))

A copy is an operator that changes the layout and nothing else. In the backward it runs on the same strides, so its
result has the same bits and strides. Each copy of a chain is in memory while the next one is made.

Two kinds of copies keep a separate group: those that the user marked otherwise than the source, and those whose
readers would add up in another order: Inductor may fuse a copy into its readers, which then loop over the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from ssd_fx.compat import OpOverload
from ssd_fx.passes.alias.packing import is_dense, may_restride, span
from ssd_fx.passes.alias.storages import untrusted
from ssd_fx.passes.groups import AliasGroup, Copy, Layout
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_key, storage_of, tensor_of, written
from ssd_fx.passes.plan import Plan

aten = torch.ops.aten
COPIES = (aten.clone.default, aten._to_copy.default)


def merge_copies(partition: Partition, plan: Plan) -> Plan:
    """Merge each group whose base is a copy of bytes in another group into that one. Number the groups again."""
    origins = _Origins.of(partition, plan.groups)
    placeholders = partition.bwd_placeholders
    merged = {g.base: g for g in plan.groups}
    for group in plan.groups:  # in the order of production: a source comes before its copies
        if not _is_plain(group) or not may_restride([placeholders[m.name] for m in group.members]):
            continue
        found = origins.find(group.base)
        if found is not None and plan.marks.get(merged[found.base].slot) == plan.marks.get(group.slot):
            origins.put(group.base, found)
            merged[found.base] = _merge(merged[found.base], group, found.copy)
            del merged[group.base]
    old = [g.slot for g in merged.values()]
    return plan.with_(
        groups=tuple(replace(g, slot=slot) for slot, g in enumerate(merged.values())),
        marks={new: plan.marks[slot] for new, slot in enumerate(old) if slot in plan.marks},
        modules={new: plan.modules[slot] for new, slot in enumerate(old) if slot in plan.modules},
    )


def copied(node: fx.Node) -> fx.Node | None:
    """The node that a node copies, element for element; None if it is no copy, or sizes are symbolic."""
    source = _copied_argument(node)
    if not isinstance(source, fx.Node):
        return None
    out = tensor_of(node)
    old = tensor_of(source)
    if out is None or old is None or storage_key(out) is None or storage_key(old) is None:
        return None
    if Layout.of(out).is_symbolic or Layout.of(old).is_symbolic:
        return None
    if (out.dtype, out.device, out.shape) != (old.dtype, old.device, old.shape):
        return None
    return source if node.target in COPIES or out.is_contiguous() else None


def again(node: fx.Node) -> tuple[OpOverload, Mapping[str, object]]:
    """The operator with which the backward makes the copy `node` again, and its keyword arguments."""
    if node.target in COPIES:
        return node.target, node.kwargs
    return aten.clone.default, {"memory_format": torch.contiguous_format}


def _copied_argument(node: fx.Node) -> object:
    """The argument that the node copies, if dtype, device and shape are the same too; None if there is none."""
    if node.target in COPIES:
        plain = len(node.args) == 1 and not set(node.kwargs) - {"memory_format", "dtype", "device"}
        return node.args[0] if plain else None
    if node.target is aten.copy.default and not node.kwargs:  # functionalization makes it of copy_
        return node.args[1] if len(node.args) == 2 else None
    if node.target is aten.repeat.default:  # with equal shapes it repeats nothing
        return node.args[0]
    if node.target is aten.cat.default and isinstance(node.args[0], (list, tuple)):
        return node.args[0][0] if len(node.args[0]) == 1 else None
    return None


def _is_plain(group: AliasGroup) -> bool:
    return not group.obstacle and group.pack is None and not group.stored.is_symbolic


def _merge(into: AliasGroup, group: AliasGroup, copy: Copy | None) -> AliasGroup:
    members = tuple(replace(m, copy=copy) for m in group.members)
    return replace(into, members=(*into.members, *members), nbytes=into.nbytes + group.nbytes)


@dataclass(frozen=True)
class _Origin:
    """The group that has the bytes of a storage, by its `base`. They are in its `copy`; None: in the base itself."""

    base: str
    copy: Copy | None


@dataclass
class _Origins:
    """The origins of the forward's storages."""

    nodes: dict[str, fx.Node]  # by name
    owners: dict[int, fx.Node]  # by storage, the first node that has it
    closed: set[int]  # storages that an operator writes into, or whose metadata may be wrong
    found: dict[int, _Origin]  # by storage, as far as known

    @staticmethod
    def of(partition: Partition, groups: Iterable[AliasGroup]) -> _Origins:
        nodes = {n.name: n for n in partition.forward.graph.nodes}
        changed = set(nodes_by_storage(target for n in nodes.values() for target in written(n)))
        origins = _Origins(
            nodes,
            {key: same[0] for key, same in nodes_by_storage(nodes.values()).items()},
            changed | untrusted(partition),
            {},
        )
        for group in groups:
            if _is_plain(group) and nodes[group.base].op != "placeholder":
                origins.put(group.base, _Origin(group.base, None))
        return origins

    def find(self, name: str) -> _Origin | None:
        """The origin of a node's storage; None if the node is no copy of bytes of a group."""
        node = self.nodes[name]
        source = copied(node)
        key = storage_of(source) if source is not None else None
        if source is None or key is None or key == storage_of(node):
            return None
        owner = self.owners[key]
        layout = Layout.of(source.meta["val"])
        if not _holds(Layout.of(owner.meta["val"]), layout):
            return None
        if key not in self.found:
            further = self.find(owner.name) if key not in self.closed else None
            if further is None:
                return None
            self.put(owner.name, further)
        origin = self.found[key]
        return _Origin(origin.base, Copy(node.name, layout, origin.copy))

    def put(self, name: str, origin: _Origin) -> None:
        """Note the origin of a node's storage."""
        key = storage_of(self.nodes[name])
        assert key is not None, "copies and bases have a storage"
        self.found[key] = origin


def _holds(held: Layout, source: Layout) -> bool:
    """Whether a tensor of layout `held`, which is all of its storage, has the elements of `source`."""
    if held.is_symbolic or held.offset or not is_dense(held) or held.dtype != source.dtype:
        return False
    lazy = source.conj or source.neg or held.conj or held.neg
    return not lazy and held.device == source.device and span(source) <= held.numel
