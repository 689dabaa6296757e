"""Saved tensors -> alias groups, by the storage of their FakeTensors.

    relu -> view -> mm          relu and view saved, one storage
    relu -> sin                 => one group {base relu, members relu and view}; one write, one read, the view replayed

    mm -> slice -> mm           an eighth of mm's storage saved
                                => one group {base mm, member slice}; the slice alone is stored (packing)
Never offloaded, because they live anyway: parameters, buffers, constants, outputs, and views of any of them. Other
inputs (the hidden state that one compiled block hands to the next) are: whether their owner lets go of them is
seen at run time. One that the forward or the backward writes into stays.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols, statically_known_true

from ssd_fx.passes.alias.packing import Stored, is_dense, may_restride, pack
from ssd_fx.passes.cost.kernels import hint
from ssd_fx.passes.groups import AliasGroup, Layout, Member
from ssd_fx.passes.joint.collectives import may_communicate
from ssd_fx.passes.partition import (
    COPIED,
    NOT_CHECKED,
    Partition,
    known_symbols,
    nodes_by_storage,
    storage_of,
    tensor_of,
    written,
)
from ssd_fx.passes.plan import Plan

DYNAMIC = "dynamic shape"
NESTED = "from a nested region"


def alias(partition: Partition, plan: Plan) -> Plan:
    """Fill `plan.groups`, in the order in which the storages are produced."""
    facts = _Facts.of(partition)
    saved = nodes_by_storage(n for n in dict.fromkeys(partition.saved))
    keys = [key for key in saved if key not in facts.live]
    groups = [_group(facts, key, saved[key]) for key in sorted(keys, key=lambda key: facts.position[facts.owner(key)])]
    return plan.with_(groups=tuple(replace(g, slot=slot) for slot, g in enumerate(groups)))


def untrusted(partition: Partition) -> set[int]:
    """Storages of the forward of which FakeTensors do not tell what shares them."""
    forward = list(partition.forward.graph.nodes)
    return _disputed(forward) | _nested(forward)


@dataclass(frozen=True)
class _Facts:
    """What is asked of the two graphs. `nodes`: of the forward, by storage, the owner first."""

    position: dict[fx.Node, int]
    nodes: dict[int, list[fx.Node]]
    placeholders: dict[str, fx.Node]
    symbols: frozenset[object]
    live: set[int]
    disputed: set[int]
    nested: set[int]
    absolute: set[int]  # storages of the backward of which it makes views that count from their start
    changed: set[int]  # storages of the backward that it writes into

    @staticmethod
    def of(partition: Partition) -> _Facts:
        forward = list(partition.forward.graph.nodes)
        return _Facts(
            {n: i for i, n in enumerate(forward)},
            nodes_by_storage(forward),
            partition.bwd_placeholders,
            known_symbols(partition.backward.graph),
            _live_anyway(forward, partition),
            _disputed(forward),
            _nested(forward),
            _absolute(partition.backward.graph),
            set(nodes_by_storage(target for node in partition.backward.graph.nodes for target in written(node))),
        )

    def owner(self, key: int) -> fx.Node:
        return self.nodes[key][0]

    def inputs(self, key: int) -> list[fx.Node]:
        return [n for n in self.nodes[key] if n.op == "placeholder"]


def _group(facts: _Facts, key: int, saved: list[fx.Node]) -> AliasGroup:
    """The group of one storage; the slot is not yet known."""
    owner = facts.owner(key)
    base = owner.meta["val"]
    nbytes = base.untyped_storage().nbytes()
    found = _stored(facts, key, saved)
    if isinstance(found, str):  # sizes may be symbolic: nothing may be computed with them but a hint for the report
        members = tuple(Member(n.name, _NO_LAYOUT) for n in saved)
        return AliasGroup(0, owner.name, None, members, int(hint(nbytes)), found, is_hint=not isinstance(nbytes, int))
    members = tuple(Member(n.name, layout) for n, layout in zip(saved, found.members, strict=True))
    if not isinstance(nbytes, int):
        return AliasGroup(0, owner.name, found.layout, members, int(hint(nbytes)), is_hint=True)
    needed = found.layout.numel * base.itemsize
    return AliasGroup(
        0, owner.name, found.layout, members, nbytes, pack=found.pack, needed_nbytes=needed if needed < nbytes else None
    )


_NO_LAYOUT = Layout((), (), 0, torch.uint8, torch.device("meta"))


def _stored(facts: _Facts, key: int, saved: list[fx.Node]) -> Stored | str:
    """What is stored of a storage, or why nothing can be."""
    if any(n.name not in facts.placeholders for n in saved):
        return "not an input of the backward"
    if key in facts.nested:
        return NESTED
    if key in facts.disputed:
        return "aliases disagree"
    if any(storage_of(facts.placeholders[n.name]) in facts.changed for n in saved):
        return "the backward writes into it"  # an input, mostly, whose owner wants to see that
    if COPIED in facts.owner(key).meta:  # were it stored, Inductor would take the copy out, and store the input
        return "copy of an input that the step changes"
    if _may_be_under_way(facts.owner(key)):
        return "a collective may still be writing it"
    obstacle = _input_obstacle(facts.inputs(key), saved)
    if obstacle:
        return obstacle
    owner, members = Layout.of(facts.owner(key).meta["val"]), [Layout.of(n.meta["val"]) for n in saved]
    if owner.conj or owner.neg:
        return "input with a lazy conjugate or negation"
    if any(layout.is_symbolic for layout in (owner, *members)):
        return _stored_symbolic(facts, key, owner, members)
    if owner.numel == 0:
        return "empty"
    if owner.numel == 1:
        return "scalar"
    absolute = any(n.target is torch.ops.aten.as_strided.default for n in facts.nodes[key])
    placed = any(storage_of(facts.placeholders[n.name]) in facts.absolute for n in saved)
    relative = [_from_first(owner, m) for m in members]
    if any(m is None for m in relative) or (absolute and owner.offset):
        return "no node covers the storage"
    restride = may_restride([facts.placeholders[n.name] for n in saved])
    # Whether the caller lets go of an input is seen at run time, by its storage; a copy of a part would hide it.
    part = not facts.inputs(key) and not placed
    found = pack(owner, [m for m in relative if m is not None], part=part, restride=restride)
    if placed and (found is None or found.pack is not None or owner.offset or not _covers(facts.owner(key))):
        return "read by its place in the storage"
    return found or "no dense tensor holds the bytes needed"


def _may_be_under_way(owner: fx.Node) -> bool:
    """Whether it is what an asynchronous collective returns, and not what the wait for it does.

    To PyTorch's metadata these are two tensors, and the first is whole as soon as it is there. In memory they are one.
    """
    made_by = owner.all_input_nodes[0] if owner.target is operator.getitem else owner
    namespace = getattr(made_by.target, "namespace", "")
    return namespace == "_c10d_functional" and may_communicate(made_by.target)


def _covers(node: fx.Node) -> bool:
    """Whether a tensor with plain sizes is all of its storage."""
    val = node.meta["val"]
    return bool(val.numel() * val.itemsize == val.untyped_storage().nbytes())


_ABSOLUTE = ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")


def _absolute(graph: fx.Graph) -> set[int]:
    """Storages of a graph that an operator reads by positions in them."""
    readers = (
        n for n in graph.nodes if getattr(getattr(n.target, "overloadpacket", None), "__name__", "") in _ABSOLUTE
    )
    keys = (storage_of(source) for n in readers if isinstance(source := n.args[0], fx.Node))
    return {key for key in keys if key is not None}


def _stored_symbolic(facts: _Facts, key: int, owner: Layout, members: list[Layout]) -> Stored | str:
    """Symbolic sizes: the owner itself, where it covers the storage and the backward knows all sizes."""
    storage = facts.owner(key).meta["val"].untyped_storage().nbytes()
    parts = [i for layout in (owner, *members) for i in layout.numbers]
    if any(free_unbacked_symbols(p) for p in parts):
        return "size depends on data"
    # Before torch 2.13 a graph cannot be asked for nodes that compute a symbolic size.
    if not free_symbols(parts) <= facts.symbols or not hasattr(fx.Graph, "materialize_symints"):
        return DYNAMIC
    covers = statically_known_true(owner.numel * owner.dtype.itemsize == storage)
    alike = all(m.dtype == owner.dtype for m in members)
    if not (covers and alike and is_dense(owner) and statically_known_true(owner.offset == 0)):
        return DYNAMIC
    return Stored(owner, None, tuple(members))


def _from_first(owner: Layout, member: Layout) -> Layout | None:
    """The member with its offset counted from the owner's first element; None if it does not lie at a whole one."""
    nbytes = member.offset * member.dtype.itemsize - owner.offset * owner.dtype.itemsize
    if nbytes < 0 or nbytes % member.dtype.itemsize:
        return None
    return replace(member, offset=nbytes // member.dtype.itemsize)


def _live_anyway(forward: list[fx.Node], partition: Partition) -> set[int]:
    held = [n for n in forward if n.op == "placeholder" and n.name not in partition.activations]
    held += [n for n in forward if n.op == "get_attr"] + partition.kept_outputs
    held += [target for node in forward for target in written(node)]
    return set(nodes_by_storage(held))


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
            keys = {storage_of(node), storage_of(arg)}
            if len(keys) > 1 and any(r.alias_info is not None for r in node.target._schema.returns):
                disputed |= {k for k in keys if k is not None}
    return disputed


def _nested(forward: list[fx.Node]) -> set[int]:
    """Storages of what calls of a nested region return, which nothing can be told of.

    All calls of one region get the FakeTensors of one of them (torch 2.13), so that results of different calls seem to
    share memory, and a view that a region returns of its input seems to be one of another call's result.
    """
    calls = (n for n in forward if n.target is torch.ops.higher_order.invoke_subgraph)
    keys = (storage_of(item) for call in calls for item in call.users)
    return {key for key in keys if key is not None}


def _input_obstacle(inputs: list[fx.Node], saved: list[fx.Node]) -> str:
    """Why a group that holds inputs of the graph cannot be offloaded; empty if it can.

    That two inputs share a storage is true of the call that was compiled and guarded by nobody. And what autograd saves
    without a version check, the backward sees as it is then, changed in place or not.
    """
    if len(inputs) > 1:
        return "inputs that alias"
    if inputs and any(n.meta.get(NOT_CHECKED) for n in saved):
        return "saved without a version check"
    return ""
