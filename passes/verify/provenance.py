"""Every node of the backward reads the same bytes of a saved tensor as before the rewrite.

    before   forward    cat -> chunk          backward   mm(chunk, ...)                chunk: bytes 2048 to 3072 of cat
    after    forward    store(cat)            backward   load -> as_strided -> mm      bytes 2048 to 3072 of load
             load is filled with cat, so mm reads bytes 2048 to 3072 of cat, as before

An element is followed back to the storage that it was computed into, before and after the rewrite. FakeTensors say
where in a storage an element lies. Nodes that move bytes (a copy, a store and its load) say from where it came. Offsets
in the plan are not used, so a wrong one is found. Layouts are affine: it is enough to follow the first element, its
neighbours and the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from ssd_fx.passes.alias.copies import COPIES, copied
from ssd_fx.passes.groups import Layout
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_key, storage_of, tensor_of
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.verify.errors import require

ops = torch.ops.ssd_fx


@dataclass(frozen=True)
class View:
    """A tensor on a storage."""

    storage: int
    layout: Layout

    @staticmethod
    def of(node: fx.Node) -> View | None:
        """The view that a node yields; None if it yields no tensor with a storage, or sizes have no hints."""
        tensor = tensor_of(node)
        key = storage_key(tensor) if tensor is not None else None
        if tensor is None or key is None:
            return None
        layout = Layout.of(tensor)
        hints = [i.node.hint if isinstance(i, torch.SymInt) else i for i in layout.numbers]
        if any(i is None for i in hints):
            return None
        n = len(layout.size)
        known = (tuple(hints[:n]), tuple(hints[n : 2 * n]), hints[-1])
        return View(key, Layout(*known, layout.dtype, layout.device))

    def byte(self, index: Iterable[int]) -> int:
        """The position in the storage, in bytes, where an element begins."""
        strides = zip(index, self.layout.stride, strict=True)
        return (self.layout.offset + sum(i * t for i, t in strides)) * self.layout.dtype.itemsize

    def index(self, byte: int) -> tuple[list[int], int]:
        """The element that a byte belongs to, and which of its bytes it is. The tensor has no gaps or overlaps."""
        element, rest = divmod(byte, self.layout.dtype.itemsize)
        element -= self.layout.offset
        found = [0] * len(self.layout.size)
        for d in sorted(range(len(found)), key=lambda d: -self.layout.stride[d]):
            if self.layout.size[d] > 1 and self.layout.stride[d]:
                found[d], element = divmod(element, self.layout.stride[d])
        return found, rest


@dataclass(frozen=True)
class Fill:
    """A tensor that owns its storage, and the tensor whose elements it was filled with."""

    filled: View
    source: View

    @staticmethod
    def of(filled: fx.Node, source: fx.Node) -> Fill | None:
        """None where one of the two views is not known."""
        target = View.of(filled)
        origin = View.of(source)
        return None if target is None or origin is None else Fill(target, origin)

    def back(self, byte: int) -> tuple[int, int]:
        """The storage and the byte in it that a byte of the filled tensor comes from."""
        index, rest = self.filled.index(byte)
        return self.source.storage, self.source.byte(index) + rest


@dataclass(frozen=True)
class Read:
    """A node of the backward, `reader`, has the saved tensor `name` as its argument number `place`."""

    name: str
    reader: str
    place: int


@dataclass(frozen=True)
class Reads:
    """The reads of saved tensors before the rewrite.

    By name: `saved`, the saved tensors, and `copies`, the copies in the forward. `tensors` stay alive, so that no other
    storage gets the identity of one of theirs.
    """

    saved: Mapping[str, View]
    copies: Mapping[str, Fill]
    all: tuple[Read, ...]
    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def of(partition: Partition) -> Reads:
        views = {n.name: view for n in partition.saved if (view := View.of(n)) is not None}
        involved = list(partition.saved)
        fills = {}
        for node in partition.forward.graph.nodes:
            source = copied(node)
            if source is not None:
                involved += [node, source]
                fill = Fill.of(node, source)
                if fill is not None:
                    fills[node.name] = fill
        reads = []
        for node in partition.backward.graph.nodes:
            for place, argument in enumerate(arguments(node)):
                if argument.op == "placeholder" and argument.name in views:
                    reads.append(Read(argument.name, node.name, place))
        tensors = tuple(t for n in involved if (t := tensor_of(n)) is not None)
        return Reads(views, fills, tuple(reads), tensors)

    def verify(self, partition: Partition, plan: Plan) -> None:
        """Check that each reader of an offloaded tensor is given the bytes that it was given before.

        Raises:
            VerifyError: it is given other bytes.
        """
        offloaded = {m.name for g in plan.offloaded for m in g.members}
        planned = {c.node for g in plan.offloaded for m in g.members if m.copy for c in m.copy.chain}
        again = {n.name for n in partition.backward.graph.nodes if n.target in COPIES}  # the cut may copy again as well
        then = {f.filled.storage: f for name, f in self.copies.items() if name in planned | again}
        now = then | _fills(partition, plan)
        names = {key: same[0].name for key, same in nodes_by_storage(partition.forward.graph.nodes).items()}
        nodes = {n.name: n for n in partition.backward.graph.nodes}
        for read in self.all:
            if read.name not in offloaded:
                continue
            node = nodes[read.reader]
            was = self.saved[read.name]
            view = View.of(arguments(node)[read.place])
            require(view is not None, f"{node.name!r} reads what has no known place", "insert", node)
            assert view is not None
            for index in _corners(was.layout.size):
                old = _origin(was, index, then)
                new = _origin(view, index, now)
                text = f"{node.name!r} reads element {index} of {read.name!r} from {_text(new, names)}, which was "
                require(old == new, f"{text}computed into {_text(old, names)}", "insert", node)


def arguments(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order. A node that occurs twice is there twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _fills(partition: Partition, plan: Plan) -> dict[int, Fill]:
    """By storage, the tensors that our nodes fill: dense copies to store, loaded tensors, copies made again."""
    stores, pairs = _stored(partition, plan)
    for node in partition.backward.graph.nodes:
        if node.target is ops.load.default:
            stored = stores[node.args[0].name]
            alike = _shape(node) == _shape(stored)
            require(alike, f"{node.name!r} has another shape than {stored.name!r}, which is stored", "insert", node)
            pairs.append((node, stored))
        elif node.target in COPIES and _keeps_dtype(node):
            pairs.append((node, node.args[0]))
    found = (Fill.of(filled, source) for filled, source in pairs if isinstance(source, fx.Node))
    return {f.filled.storage: f for f in found if f is not None and f.filled.storage != f.source.storage}


def _keeps_dtype(copy: fx.Node) -> bool:
    """Whether a copy has the elements of its source. A cast computes others."""
    source = copy.args[0]
    new, old = tensor_of(copy), tensor_of(source) if isinstance(source, fx.Node) else None
    return new is not None and old is not None and new.dtype == old.dtype


def _stored(partition: Partition, plan: Plan) -> tuple[dict[str, fx.Node], list[tuple[fx.Node, object]]]:
    """The node that each store writes, by name of the store; and those nodes, each with the node that it is made of."""
    pairs: list[tuple[fx.Node, object]] = []
    stores: dict[str, fx.Node] = {}
    bases = {g.slot: g.base for g in plan.offloaded}
    nodes = {n.name: n for n in partition.forward.graph.nodes}
    for store in nodes.values():
        if store.target is not ops.store.default:
            continue
        stored = store.args[0]
        base = bases[cast(int, store.args[3])]
        assert isinstance(stored, fx.Node)
        is_packed = stored.name != base and stored.target in COPIES
        source = stored.args[0] if is_packed else stored
        assert isinstance(source, fx.Node)
        text = f"{store.name!r} stores {stored.name!r}, which is not of {base!r}"
        require(storage_of(source) == storage_of(nodes[base]), text, "insert", store)
        stores[store.name] = stored
        pairs.append((stored, source))
    return stores, pairs


def _shape(node: fx.Node) -> list[str]:
    """The shape as text; symbols are compared by name, which adds no guard."""
    return list(map(str, node.meta["val"].shape))


def _origin(view: View, index: tuple[int, ...], fills: Mapping[int, Fill]) -> tuple[int, int]:
    """The storage that an element was computed into, and where in it, in bytes."""
    storage = view.storage
    byte = view.byte(index)
    while storage in fills:
        storage, byte = fills[storage].back(byte)
    return storage, byte


def _corners(size: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The indices of the first element, its neighbours and the last one; none for an empty tensor."""
    if 0 in size:
        return
    yield (0,) * len(size)
    for d, n in enumerate(size):
        if n > 1:
            yield tuple(1 if d == k else 0 for k in range(len(size)))
    if any(n > 1 for n in size):
        yield tuple(n - 1 for n in size)


def _text(place: tuple[int, int], names: Mapping[int, str]) -> str:
    storage, byte = place
    return f"byte {byte} of {names.get(storage, 'another storage')!r}"
