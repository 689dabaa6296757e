"""Which kernels Inductor will make of a graph: which nodes share a kernel, and which are written to memory.

    mm -> add -> gelu -> mm         add lives in registers: one kernel computes it with gelu
      \\                            mm, gelu are buffers: a library call or the caller reads them from memory

Inductor decides that later, by rules that are guessed here. Both the time (`roofline.py`) and the memory
(`footprint.py`) of a graph are predicted from this guess.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ssd_fx.compat import inductor_config as config
from ssd_fx.compat import inlined_at_most
from ssd_fx.passes.cost.fusion import Loop, Space, fuse
from ssd_fx.passes.cost.operators import (
    HEAVY,
    LOOPS,
    REDUCTIONS,
    SCATTERS,
    addmm,
    adds_in_a_loop,
    has_complex,
    hint,
    is_extern,
    is_inlined,
    operator_of,
)
from ssd_fx.passes.cost.sums import running_sums
from ssd_fx.passes.partition import RECOMPUTED, Partition, storage_key, tensor_of, tensors_of

aten = torch.ops.aten

# Operators that read no more of their first input than they yield.
_LOOKUPS = (
    *(aten.embedding, aten.gather, aten.index, aten._unsafe_index, aten.index_select),
    torch.ops.prims.inductor_lookup_seed,
)

MANY_ROWS, FEW_COLUMNS = 512, 1 << 15


@dataclass(slots=True)
class _Work:
    """The work that a kernel does for one node if it computes that node, instead of reading it from memory.

    `reads`: the nodes that it reads from memory, each with the offsets of the views that it is read through: Inductor
    counts the parts of a `chunk` one by one. `operations`: the number of nodes that it computes, with repetitions.
    `heavy`: whether one of them is in `HEAVY`.
    """

    reads: set[tuple[int, ...]]
    operations: int
    heavy: bool

    def add(self, other: _Work, offset: int) -> None:
        """Takes on the work of a node whose result is read through a view with that offset."""
        self.reads |= {(*read, offset) for read in other.reads} if offset else other.reads
        self.operations += other.operations
        self.heavy |= other.heavy


class Kernels:
    """The kernels of one graph. Its nodes are named by their indices.

    `storages`: the storages of a node's outputs, with their bytes. `computes`: whether a kernel computes the node; no
    kernel computes a view. `calls`: the nodes that are library calls. `inside`: the loops and calls that compute a
    node, each named by the node whose result it writes to memory. That is the node itself. If it is cheap to do again,
    each of its readers computes it instead. `early`: the readers that compute a node themselves although it is written
    for a later reader. `maker`: the node that writes a storage; an input counts as its own maker. `reads`: the storages
    that a node reads from memory, with the bytes. `kernel`: the kernel of a loop, the same for fused loops. `reducing`:
    the kernels with a reduction. `at`: the place where a loop runs. `sums`: the loops that are a reduction.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self._sizes = [_sizes(n) for n in self.nodes]
        self.storages = [{key: whole for key, (whole, _) in sizes.items()} for sizes in self._sizes]
        self.view: list[bool] = []
        self._sources: list[list[int]] = []  # the nodes that a node reads, through views
        self._readers: list[list[int]] = [[] for _ in self.nodes]  # the nodes that read it, through views
        self._strided: set[int] = set()  # the nodes that `as_strided` views: they must be written
        for i, node in enumerate(self.nodes):
            self._link(i, node)
        self.computes = [n.op == "call_function" and self._makes(i) for i, n in enumerate(self.nodes)]
        self._running = running_sums(self.nodes)
        mms = {i: self.index[mm] for i, n in enumerate(self.nodes) if (mm := addmm(n, n in self._running)) is not None}
        self.calls = {i for i, n in enumerate(self.nodes) if is_extern(n) and not adds_in_a_loop(n)} | mms.keys()
        self._most = {on_cpu: inlined_at_most(on_cpu) for on_cpu in (True, False)}
        inlined, self.early = self._inlined()
        self.inside = self._inside(inlined, {mm: add for add, mm in mms.items()})
        makers = [i for i in range(len(self.nodes)) if self._makes(i) and i in self.inside[i]]
        self.maker = {key: i for i in reversed(makers) for key in self.storages[i]}
        self.reads = [self._reads(i) if computed else {} for i, computed in enumerate(self.computes)]
        loops = self._loops([i for i in makers if self.computes[i]])
        self._behind = {i: loop.behind for i, loop in loops.items()}
        fused = fuse(loops)
        self.kernel = {i: fused.of(i) for i in loops}
        self.sums = {i for i, loop in loops.items() if loop.space is not None and loop.space.reduces}
        self.reducing = {self.kernel[i] for i in self.sums}
        self.at = list(range(len(self.nodes)))
        for i, place in fused.places().items():
            self.at[i] = place

    def kernels(self, i: int) -> set[int]:
        """The kernels that compute a node."""
        return {self.kernel[k] for k in self.inside[i] if k in self.kernel}

    def split(self) -> set[int]:
        """The kernels that become two: on a device Inductor sums up columns in parts, and then the parts.

        Inductor does so where one thread for each column would leave the device idle (`num_splits` in its ir.py, torch
        2.13).
        """
        return {self.kernel[i] for i in self.sums if not is_on_cpu(self.nodes[i]) and _sums_columns(self.nodes[i])}

    def alone(self) -> set[int]:
        """The library calls, and the nodes that they read. Only these are sure to be kernels of their own."""
        read = {i for i, readers in enumerate(self._readers) if self.computes[i] and not self.calls.isdisjoint(readers)}
        return {i for i in self.calls | read if i in self.inside[i]}

    def functions(self) -> dict[int, tuple[int, int]]:
        """For the place of each loop, the places of the first and the last kernel of its C++ function: on the CPU all
        loops between two library calls are one function. Views of complex numbers are library calls too. Nodes of ours
        cut functions, but their places are not known yet."""
        found, run = dict[int, tuple[int, int]](), list[int]()
        devices = {i: tensors_of(self.nodes[i])[0].device.type for i in self.kernel}
        alone = {self.at[i] for i in self.kernel if i in self.calls or devices[i] != "cpu"}
        alone |= {self.at[i] for i, node in enumerate(self.nodes) if self.view[i] and has_complex(node)}
        for place in sorted(alone | {self.at[i] for i in self.kernel}):
            run = [] if place in alone else [*run, place]
            found |= dict.fromkeys(run, (run[0], place)) if run else {}
        return found

    def comes_behind(self, i: int, others: Collection[int]) -> bool:
        """Whether a loop reads the results of all loops `others`, directly or through other loops."""
        seen, work, first = {i}, [i], min(others, default=i)
        while work:
            new = {k for k in self._behind.get(work.pop(), ()) if k >= first} - seen
            seen |= new
            work += new
        return seen.issuperset(others)

    def _makes(self, i: int) -> bool:
        return bool(self.storages[i]) and not self.view[i]

    def _link(self, i: int, node: fx.Node) -> None:
        """Find whether a node is a view, and which nodes it reads. The nodes before it are linked already."""
        inputs = [self.index[n] for n in node.all_input_nodes]
        keys = set().union(*(self.storages[k] for k in inputs), ())
        self.view.append(bool(self.storages[i]) and self.storages[i].keys() <= keys)
        inputs = inputs[:1] if self.view[i] else inputs
        through: list[int] = []
        for k in inputs:
            through += self._sources[k] if self.view[k] else [k]
        self._sources.append(list(dict.fromkeys(s for s in through if self.storages[s])))
        if node.target is aten.as_strided.default:
            self._strided.update(through)
        if not self.view[i]:
            for source in self._sources[i]:
                self._readers[source].append(i)

    def _read_at(self, i: int) -> list[tuple[int, int]]:
        """The nodes that a node reads, each with the offset of the view that it is read through. Views that begin at
        one place count once, though Inductor tells apart those in another order."""
        found = list[tuple[int, int]]()
        for node in self.nodes[i].all_input_nodes:
            k, tensor = self.index[node], tensor_of(node)
            sources = self._sources[k] if self.view[k] else [k]
            offset = hint(tensor.storage_offset()) if self.view[k] and tensor is not None else 0
            found += [(source, offset) for source in sources if self.storages[source]]
        return list(dict.fromkeys(found))

    def _inside(self, inlined: Collection[int], addmms: dict[int, int]) -> list[Collection[int]]:
        inside: list[Collection[int]] = [(i,) for i in range(len(self.nodes))]
        for i in reversed(range(len(self.nodes))):
            if i in addmms:
                inside[i] = (addmms[i],)
            elif i in inlined:
                inside[i] = set().union(*(inside[r] for r in self._readers[i]))
            elif i in self.early:
                inside[i] = {i}.union(*(inside[r] for r in self.early[i]))
        return inside

    def _inlined(self) -> tuple[Collection[int], dict[int, set[int]]]:
        """Which nodes Inductor does not write to memory, but computes inside their readers; and `early`."""
        inlined: dict[int, _Work] = {}
        early: dict[int, set[int]] = {}
        again: dict[int, _Work] = {}  # the work of the nodes in `early`, which their early readers do
        for i, node in enumerate(self.nodes):
            if not self.computes[i] or not is_inlined(node) or i in self.calls:
                continue
            work = _Work(set(), 1, is_on_cpu(node) and operator_of(node) in HEAVY)
            for source, offset in self._read_at(i):
                if source in inlined:
                    work.add(inlined[source], offset)
                elif i in early.get(source, ()):
                    work.add(again[source], offset)
                else:
                    work.reads.add((source, offset))
            if self._is_realized(i, work):
                continue
            first = min((r for r in self._readers[i] if r in self.calls or self._is_output(r)), default=None)
            if first is None:
                inlined[i] = work
            elif before := {r for r in self._readers[i] if r < first}:
                early[i], again[i] = before, work
        return inlined, early

    def _is_realized(self, i: int, work: _Work) -> bool:
        """Whether Inductor writes a node to memory at once. It writes running sums because we tell it to. By its own
        rules it writes a node that a library call or the caller reads, that `as_strided` views (as the scale of a group
        norm), or that would cost too much if several readers computed it (`should_realize_on_reuse`, and thresholds in
        its configuration, torch 2.13). Inductor counts operations, of which a node has about two.

        A node that a call reads through a view is written when Inductor comes to that call. Until then its readers
        compute it themselves. A returned node that reads no memory, such as indices, is not written at once either: its
        other readers compute it themselves (`make_loader`)."""
        node, readers = self.nodes[i], self._readers[i]
        most_reads, most_operations = self._most[is_on_cpu(node)]
        called = any(r in self.calls and self.nodes[r] in node.users for r in readers)
        returned = bool(work.reads) and any(map(self._is_output, readers))
        is_seen = called or returned or i in self._strided or node in self._running
        if is_seen or len(work.reads) > most_reads:
            return True
        too_long = len(work.reads) > config.realize_reads_threshold or 2 * work.operations > most_operations
        return len(readers) > 1 and (too_long or work.heavy)

    def operand(self, i: int) -> Collection[int]:
        """The storages of a node's first operand."""
        return self.storages[self.index[self.nodes[i].all_input_nodes[0]]].keys()

    def _is_output(self, i: int) -> bool:
        return bool(self.nodes[i].op == "output")

    def is_read(self, key: int, i: int) -> bool:
        """Whether the node `i` reads a storage of its inputs from memory: a node writes that storage, and `i` does not
        compute it itself."""
        return key in self.maker and i not in self.early.get(self.maker[key], ())

    def _reads(self, i: int) -> dict[int, int]:
        """The storages that the node itself reads from memory, with the bytes that it reads of each."""
        node, found = self.nodes[i], dict[int, int]()
        for source in node.all_input_nodes:
            for key, (_, seen) in self._sizes[self.index[source]].items():
                if self.is_read(key, i):
                    found[key] = max(found.get(key, 0), seen)
        if operator_of(node) in _LOOKUPS:
            most = max(seen for _, seen in self._sizes[i].values())
            return {key: min(nbytes, most) for key, nbytes in found.items()}
        return found

    def _loops(self, makers: list[int]) -> dict[int, Loop]:
        loops = {i: Loop(i, writes=self.storages[i]) for i in makers}
        for i, loop in loops.items():
            loop.again, loop.running = RECOMPUTED in self.nodes[i].meta, self.nodes[i] in self._running
            if operator_of(self.nodes[i]) in SCATTERS:
                loop.onto = self.operand(i)
        shapes = {i: _shape(self.nodes[i]) for i in makers if i not in self.calls}
        goes_by_rows = {i for i in shapes if 0 not in summed(self.nodes[i])}
        for i in (i for i, computed in enumerate(self.computes) if computed):
            rows = _rows(self.nodes[i])
            for k in self.inside[i]:
                if k in loops:
                    loops[k].reads |= {key: nbytes for key, nbytes in self.reads[i].items() if self.maker[key] != k}
                if k in goes_by_rows and rows is not None and rows.elements == shapes[k].elements:
                    shapes[k] = replace(shapes[k], outer=min(shapes[k].outer, rows.outer))
        for k, loop in loops.items():
            loop.space = shapes.get(k)
            loop.behind = {self.maker[key] for key in loop.reads} & loops.keys()
        return loops


def both_kernels(partition: Partition) -> tuple[Kernels, Kernels]:
    """The kernels of the forward and of the backward; for `Partition.once`."""
    return Kernels(partition.forward.graph), Kernels(partition.backward.graph)


def _sizes(node: fx.Node) -> dict[int, tuple[int, int]]:
    """Storages of the node's outputs, each with its bytes and with the bytes that a reader of the output reads. A
    reader never reads more bytes than the storage has, even if the tensor is expanded."""
    found: dict[int, tuple[int, int]] = {}
    for tensor in tensors_of(node):
        key = storage_key(tensor)
        if key is not None:
            whole = hint(tensor.untyped_storage().nbytes())
            seen = min(hint(tensor.numel()) * tensor.itemsize, whole)
            found[key] = (whole, max(seen, found[key][1] if key in found else 0))
    return found


def _shape(node: fx.Node) -> Space:
    """The space of a loop that yields the node: the elements that it makes, or those that it sums up or scatters."""
    of = (node, *node.all_input_nodes) if operator_of(node) in LOOPS else (node,)
    elements = _added(node) if adds_in_a_loop(node) else max(count(t) for n in of for t in tensors_of(n))
    reduces = operator_of(node) in REDUCTIONS
    outer = max(map(count, tensors_of(node))) if reduces else elements
    return Space(elements, outer, reduces, on_cpu=tensors_of(node)[0].device.type == "cpu")


def _added(node: fx.Node) -> int:
    """How many values `index_put` writes: one for each of the indices, in each of the other dimensions."""
    indices: Any = node.args[1]
    out = tensor_of(node)
    assert out is not None
    shapes = [tuple(map(hint, tensor.shape)) for index in indices if index is not None for tensor in tensors_of(index)]
    others = [hint(size) for size, index in itertools.zip_longest(out.shape, indices) if index is None]
    return int(math.prod(torch.broadcast_shapes(*shapes))) * math.prod(others)


def _rows(node: fx.Node) -> Space | None:
    """The space that a pointwise node asks of a loop on the CPU: nested loops if an input is broadcast, or lies in
    another order or with gaps."""
    out = tensor_of(node)
    if out is None or out.device.type != "cpu" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    sizes = [hint(size) for size in out.shape]
    inputs = [t for n in node.all_input_nodes for t in tensors_of(n)]
    outer = min([count(out), *(_outer(t, sizes) for t in inputs)])
    return Space(count(out), outer, reduces=False, on_cpu=True)


def _outer(tensor: torch.Tensor, sizes: list[int]) -> int:
    """The iterations of the outermost of the nested loops that it takes to read a tensor broadcast to `sizes`."""
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    steps = [0 if hint(size) == 1 else hint(step) for size, step in dims]
    steps = [0] * (len(sizes) - len(steps)) + steps
    loops = [(size, step) for size, step in zip(sizes, steps, strict=False) if size != 1]
    breaks = (i for i, ((_, step), (size, inner)) in enumerate(itertools.pairwise(loops), 1) if step != size * inner)
    return math.prod(size for size, _ in loops[: next(breaks, None)])


def _sums_columns(node: fx.Node) -> bool:
    """Whether a reduction sums up the columns of a matrix that has many rows and few columns."""
    given, dims = tensor_of(node.all_input_nodes[0]), summed(node)
    if given is None or given.ndim - 1 in dims or operator_of(node) is aten.argmax:  # argmax is never split
        return False
    rows = math.prod(hint(given.shape[d]) for d in dims)
    return rows >= MANY_ROWS and count(given) / rows <= FEW_COLUMNS


def summed(node: fx.Node) -> Collection[int]:
    """The dimensions of its input that a reduction reduces; none if the node is no reduction."""
    given = tensor_of(node.all_input_nodes[0]) if operator_of(node) in REDUCTIONS else None
    if given is None:
        return ()
    over = node.args[1] if len(node.args) > 1 else None
    if type(over) is int:
        over = [over]
    return {d % max(given.ndim, 1) for d in over} if isinstance(over, (list, tuple)) and over else range(given.ndim)


def is_on_cpu(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.device.type == "cpu"


def count(tensor: torch.Tensor) -> int:
    """Elements of a tensor."""
    return hint(tensor.numel())
