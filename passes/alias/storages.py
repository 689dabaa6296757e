"""Alias groups: the saved tensors, grouped by the storage of their FakeTensors.

    relu -> view -> mm          relu and view saved, one storage
    relu -> sin                 => group {base relu, members relu and view}: one write, one read, the view is rebuilt

    mm -> slice -> mm_1         an eighth of mm's storage saved
                                => group {base mm, member slice}: the slice alone is stored (`packing.py`)

No group has parameters, buffers, constants, outputs, or views of them: they stay in memory anyway. Other inputs do have
a group, such as the hidden state that one compiled block passes to the next. Only at run time it shows whether the
caller drops them. An input that the forward or the backward writes into stays in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols, statically_known_true

from ssd_fx.compat import OpOverload, run_and_save_rng_state
from ssd_fx.passes.alias.packing import Stored, is_dense, is_reinterpreted, may_restride, pack
from ssd_fx.passes.cost.operators import hint
from ssd_fx.passes.groups import AliasGroup, Layout, Member
from ssd_fx.passes.joint.collectives import is_silent, may_communicate
from ssd_fx.passes.partition import (
    COPIED,
    NOT_CHECKED,
    Partition,
    is_part_of_subclass,
    known_symbols,
    nodes_by_storage,
    storage_key,
    storage_of,
    tensors_of,
    written,
)
from ssd_fx.passes.plan import Plan

DYNAMIC = "dynamic shape"
NESTED = "from a nested region"
JAGGED = "beside a jagged nested tensor that the caller passes"
_EMBEDDING_BAG = (torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default)


def alias(partition: Partition, plan: Plan) -> Plan:
    """Fill `plan.groups`, in the order in which the storages are produced."""
    facts = _Facts.of(partition)
    saved = nodes_by_storage(dict.fromkeys(partition.saved))
    keys = [key for key in saved if key not in facts.live]
    keys.sort(key=lambda key: facts.position[facts.owner(key)])
    return plan.with_(groups=tuple(_group(facts, slot, key, saved[key]) for slot, key in enumerate(keys)))


def untrusted(partition: Partition) -> set[int]:
    """Storages of the forward whose FakeTensors may be wrong about which tensors share memory."""
    forward = list(partition.forward.graph.nodes)
    return _disputed(forward) | _nested(forward)


@dataclass(frozen=True)
class _Facts:
    """Facts about the two graphs, computed once. Sets of int are sets of storages."""

    position: dict[fx.Node, int]  # in the forward
    nodes: dict[int, list[fx.Node]]  # of the forward, by storage, the owner first
    placeholders: dict[str, fx.Node]  # of the backward
    symbols: frozenset[object]  # sizes that the backward knows
    jagged: bool  # the caller passes a tensor of rows of unequal length
    live: set[int]  # in memory anyway
    disputed: set[int]  # it is unknown which tensors share them
    nested: set[int]
    quantized: set[int]  # their FakeTensors are of floats
    absolute: set[int]  # the backward reads them by positions counted from their start
    changed: set[int]  # the backward writes into them
    bytes_of_bools: set[int]  # a graph reads bools there as numbers
    returned: set[int]  # the backward returns them, or views of them

    @staticmethod
    def of(partition: Partition) -> _Facts:
        forward = list(partition.forward.graph.nodes)
        return _Facts(
            {n: i for i, n in enumerate(forward)},
            nodes_by_storage(forward),
            partition.bwd_placeholders,
            known_symbols(partition.backward.graph),
            any(is_part_of_subclass(n) and n.meta["desc"].attr == "_offsets" for n in forward),
            _live_anyway(forward, partition),
            _disputed(forward),
            _nested(forward),
            _quantized(forward),
            _absolute(partition.backward.graph),
            set(nodes_by_storage(target for node in partition.backward.graph.nodes for target in written(node))),
            _bytes_of_bools([*forward, *partition.backward.graph.nodes]),
            set(nodes_by_storage(partition.backward.graph.output_node().all_input_nodes)),
        )

    def owner(self, key: int) -> fx.Node:
        return self.nodes[key][0]

    def inputs(self, key: int) -> list[fx.Node]:
        return [n for n in self.nodes[key] if n.op == "placeholder"]


def _group(facts: _Facts, slot: int, key: int, saved: list[fx.Node]) -> AliasGroup:
    """The group of one storage."""
    owner = facts.owner(key)
    base = owner.meta["val"]
    nbytes = hint(base.untyped_storage().nbytes())
    found = _stored(facts, key, saved)
    if isinstance(found, str):  # sizes may be symbolic: nothing may be computed with them but a hint for the report
        members = tuple(Member(n.name, _NO_LAYOUT) for n in saved)
        return AliasGroup(slot, owner.name, None, members, nbytes, nbytes, found)
    members = tuple(Member(n.name, layout) for n, layout in zip(saved, found.members, strict=True))
    stored = min(nbytes, hint(found.layout.nbytes))
    return AliasGroup(slot, owner.name, found.layout, members, nbytes, stored, pack=found.pack)


_NO_LAYOUT = Layout((), (), 0, torch.uint8, torch.device("meta"))


def _stored(facts: _Facts, key: int, saved: list[fx.Node]) -> Stored | str:
    """The tensor that is stored of a storage, or why none can be."""
    obstacle = _obstacle(facts, key, saved)
    if obstacle:
        return obstacle
    owner = Layout.of(facts.owner(key).meta["val"])
    members = [Layout.of(n.meta["val"]) for n in saved]
    if owner.conj or owner.neg:
        return "input with a lazy conjugate or negation"
    if any(layout.is_symbolic for layout in (owner, *members)):
        return _stored_symbolic(facts, key, owner, members)
    if owner.numel == 0:
        return "empty"
    if owner.numel == 1:
        return "scalar"
    return _stored_plain(facts, key, saved, owner, members)


def _obstacle(facts: _Facts, key: int, saved: list[fx.Node]) -> str:
    """Why a storage cannot be offloaded, whatever its layout; empty if it can."""
    if any(_is_rng_state(n) for n in saved):
        return "the state of a random number generator"  # the backward knows it by another name
    if any(n.name not in facts.placeholders for n in saved):
        return "not an input of the backward"
    if key in facts.nested:
        return NESTED
    if key in facts.disputed:
        return "aliases disagree"
    if key in facts.quantized:
        return "quantized, and PyTorch's metadata say float"
    if any(storage_of(facts.placeholders[n.name]) in facts.changed for n in saved):
        return "the backward writes into it"  # mostly an input, whose owner must see the write
    if any(storage_of(facts.placeholders[n.name]) in facts.returned for n in saved):
        return "the backward returns it"  # compiled autograd would accumulate it before the wait
    if any(storage_of(n) in facts.bytes_of_bools for n in (*saved, *(facts.placeholders[m.name] for m in saved))):
        return "its bools are read as numbers"  # a byte of 7 is true, and compression would make it 1
    if COPIED in facts.owner(key).meta:  # Inductor would take the copy out, and the store would write the input
        return "copy of an input that the step changes"
    if _may_be_in_flight(facts.owner(key)):
        return "a collective may still be writing it"
    if _has_other_sizes(facts.owner(key)):
        return "its kernel may return other sizes than PyTorch's metadata say"
    inputs = facts.inputs(key)
    if any(map(is_part_of_subclass, inputs)):
        return "part of a tensor subclass that the caller passes"  # only the subclass knows what else holds it
    if len(inputs) > 1:  # that they share a storage holds for the call that was compiled; no guard checks it later
        return "inputs that alias"
    if inputs and any(n.meta.get(NOT_CHECKED) for n in saved):  # changed in place, the backward must see the change
        return "saved without a version check"
    return ""


def _is_rng_state(node: fx.Node) -> bool:
    """Whether a node is the generator's state from which a checkpoint's backward draws its random numbers again."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and (source.target, node.args[1]) == (run_and_save_rng_state, 0)


def _bytes_of_bools(nodes: Iterable[fx.Node]) -> set[int]:
    """Storages of bools that nodes of either graph view as another dtype."""
    views = [n for n in nodes if n.target is torch.ops.aten.view.dtype]
    sources = [source for n in views for source in (n, *n.all_input_nodes)]
    return {key for n in sources if n.meta["val"].dtype is torch.bool and (key := storage_of(n)) is not None}


def _has_other_sizes(owner: fx.Node) -> bool:
    """Whether a node is a result of `_embedding_bag` besides the first.

    Some kernels return empty tensors there, which nothing reads.
    """
    source = owner.args[0] if owner.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in _EMBEDDING_BAG and bool(owner.args[1] != 0)


def _stored_plain(facts: _Facts, key: int, saved: list[fx.Node], owner: Layout, members: list[Layout]) -> Stored | str:
    """The tensor that is stored of a storage whose sizes are numbers, or why none can be."""
    placeholders = [facts.placeholders[n.name] for n in saved]
    absolute = any(n.target is torch.ops.aten.as_strided.default for n in facts.nodes[key])
    placed = any(storage_of(p) in facts.absolute for p in placeholders)
    relative = [m for member in members if (m := _from_first(owner, member)) is not None]
    if len(relative) < len(members) or (absolute and owner.offset):
        return "no node covers the storage"
    # An input is stored whole: its own storage shows the runtime whether the caller dropped it. A copy would not.
    part = not facts.inputs(key) and not placed and not is_reinterpreted(placeholders)
    found = pack(owner, relative, part=part, restride=may_restride(placeholders))
    as_it_is = found is not None and found.pack is None and not owner.offset
    if placed and not (as_it_is and _covers(facts.owner(key))):
        return "read by its place in the storage"
    return found or "no dense tensor holds the bytes needed"


_QUANTIZE = (
    *("quantized::", "aten::quantize_per_", "aten::_make_per_"),
    *("aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized"),
)
_DEQUANTIZE = ("aten::dequantize", "aten::int_repr", "aten::q_")


def _quantized(forward: list[fx.Node]) -> set[int]:
    """Storages of quantized tensors.

    Their FakeTensors are of floats (torch 2.13), so only operators tell. The result of an operator that reads a
    quantized tensor counts as quantized too, unless the operator dequantizes.
    """
    found: set[fx.Node] = set()
    for node in forward:
        name = node.target.name() if isinstance(node.target, OpOverload) else ""
        reads_one = not found.isdisjoint(node.all_input_nodes)
        if name.startswith(_QUANTIZE) or (reads_one and not name.startswith(_DEQUANTIZE)):
            found.add(node)
    return set(nodes_by_storage(found))


def _may_be_in_flight(owner: fx.Node) -> bool:
    """Whether a node is the result of an asynchronous collective, before the wait for it.

    Hazard: PyTorch's metadata has two tensors, this one and the result of the wait. In memory they are one, and the
    collective may still be writing it.
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
    """Storages that an operator of the graph reads by positions counted from their start."""
    calls = [n for n in graph.nodes if isinstance(n.target, OpOverload)]
    readers = [n for n in calls if n.target.overloadpacket.__name__ in _ABSOLUTE]
    return set(nodes_by_storage(n.args[0] for n in readers if isinstance(n.args[0], fx.Node)))


def _stored_symbolic(facts: _Facts, key: int, owner: Layout, members: list[Layout]) -> Stored | str:
    """The tensor that is stored if sizes are symbolic, which is the owner itself; or why none can be.

    The owner must cover its storage, and the backward must know all sizes.
    """
    storage = facts.owner(key).meta["val"].untyped_storage().nbytes()
    parts = [i for layout in (owner, *members) for i in layout.numbers]
    unbacked = {s for p in parts for s in free_unbacked_symbols(p)}
    if unbacked:
        sized = (n for n in facts.position for t in tensors_of(n) if unbacked & free_unbacked_symbols(t))
        return f"size depends on data: {next(sized, facts.owner(key)).target}"
    # Before torch 2.13 a graph has no method that makes nodes for symbolic sizes.
    if not free_symbols(parts) <= facts.symbols or not hasattr(fx.Graph, "materialize_symints"):
        return JAGGED if facts.jagged else DYNAMIC
    covers = statically_known_true(owner.nbytes == storage)
    alike = all(m.dtype == owner.dtype for m in members)
    if not (covers and alike and is_dense(owner) and statically_known_true(owner.offset == 0)):
        return DYNAMIC
    return Stored(owner, None, tuple(members))


def _from_first(owner: Layout, member: Layout) -> Layout | None:
    """The member with its offset counted from the owner's first element; None if that offset is no whole number."""
    nbytes = member.offset * member.dtype.itemsize - owner.offset * owner.dtype.itemsize
    if nbytes < 0 or nbytes % member.dtype.itemsize:
        return None
    return replace(member, offset=nbytes // member.dtype.itemsize)


def _live_anyway(forward: list[fx.Node], partition: Partition) -> set[int]:
    """Storages that stay in memory whatever is saved: of parameters, buffers, constants, outputs, changed inputs."""
    new = set(partition.activation_inputs)
    held = [n for n in forward if n.op == "placeholder" and n not in new]
    held += [n for n in forward if n.op == "get_attr"] + partition.caller_outputs
    held += [target for node in forward for target in written(node)]
    return set(nodes_by_storage(held))


def _disputed(forward: list[fx.Node]) -> set[int]:
    """Storages where an operator's schema and its FakeTensors disagree on what shares memory."""
    return _declared_only(forward) | _undeclared(forward)


def _declared_only(forward: list[fx.Node]) -> set[int]:
    """Storages of nodes that are views of an argument by their operator's schema, but not by their FakeTensors.

    Items of a tuple of views are such views too. Passes that run before the partitioner may leave such metadata, and so
    may the min-cut, which merges equal expressions. Then it is unknown which tensors share memory.
    """
    disputed: set[int] = set()
    for node in forward:
        of_views = node.all_input_nodes[0] if node.target is operator.getitem else node
        if not isinstance(of_views.target, OpOverload):
            continue
        schema = of_views.target._schema
        views = {storage_key(out) for out in tensors_of(node)}
        if not views or not _declares_views(of_views.target):
            continue
        for arg, info in zip(of_views.args, schema.arguments, strict=False):
            if info.alias_info is not None and isinstance(arg, fx.Node):
                keys = views | {storage_of(arg)}
                if len(keys) > 1:
                    disputed |= {key for key in keys if key is not None}
    return disputed


def _undeclared(forward: list[fx.Node]) -> set[int]:
    """Storages that results of an operator share with its arguments or with each other, by their FakeTensors alone.

    By its schema, a result of another library's operator is a new tensor. The fake implementation may still return an
    argument, as `x.contiguous()` does. PyTorch's own fake implementations share what their operators share.

    Hazard: result and argument would be one group, and the backward would get the wrong one of them
    (tests/test_untrue_fakes.py).
    """
    undeclared: set[int] = set()
    for node in forward:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.target, OpOverload) and (is_silent(node.target) or _declares_views(node.target)):
            continue
        given = {storage_of(source) for source in node.all_input_nodes}
        made = [key for tensor in tensors_of(node) if (key := storage_key(tensor)) is not None]
        undeclared |= {key for key in made if key in given or made.count(key) > 1}
    return undeclared


def _declares_views(target: OpOverload) -> bool:
    return any(result.alias_info is not None for result in target._schema.returns)


def _nested(forward: list[fx.Node]) -> set[int]:
    """Storages of the results of nested regions. Their FakeTensors are wrong about what shares them.

    All calls of one region get the FakeTensors of one of them (torch 2.13). So results of different calls seem to share
    memory. If a region returns a view of its input, it seems to be a view of another call's result.
    """
    calls = (n for n in forward if n.target is torch.ops.higher_order.invoke_subgraph)
    return set(nodes_by_storage(item for call in calls for item in call.users))
