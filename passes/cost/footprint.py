"""Which nodes of a graph will be buffers of Inductor's, when those live, and what that adds up to.

    mm -> add -> gelu -> mm         add lives in registers: one kernel computes it with gelu
      \\                            mm, gelu are buffers: what an extern kernel or the caller reads, somebody must write

Inductor decides that later; what is predicted here decides only where memory is thought to be short.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from ssd_fx.passes.cost.fusion import Kernel, places
from ssd_fx.passes.cost.kernels import hint
from ssd_fx.passes.cost.operators import HEAVY, REUSED_READS, addmm, is_extern, is_inlined, reduces_in_a_loop
from ssd_fx.passes.partition import Partition, storage_key, tensor_of, tensors_of


@dataclass(frozen=True)
class Buffers:
    """The storages of one graph that will be memory, by storage key.

    `first`, `last`: indices of the nodes in whose kernels a buffer is written and read last (the output is no reader),
    as the kernels will run; `read_last`: the latest node of those kernels as the graph has them. `read_first`: the
    first node that reads it, or where the kernel runs that reads it first, if that is earlier. `nbytes`: its size;
    `held`: what the output returns; `in_place`: what a kernel writes over an input that dies there.
    """

    first: Mapping[int, int]
    last: Mapping[int, int]
    read_first: Mapping[int, int]
    read_last: Mapping[int, int]
    nbytes: Mapping[int, int]
    held: frozenset[int]
    in_place: frozenset[int]

    def alive(self, keys: Iterable[int], count: int) -> list[int]:
        """Bytes of the buffers `keys` during every one of `count` nodes."""
        change = [0] * (count + 1)
        for key in keys:
            last = count - 1 if key in self.held else self.last[key]
            first = self.first[key] + 1 if key in self.in_place else self.first[key]
            change[min(first, last)] += self.nbytes[key]
            change[last + 1] -= self.nbytes[key]
        return list(itertools.accumulate(change))[:count]


@dataclass(slots=True)
class _Buffer:
    """One storage while it is looked at; the fields are those of `Buffers`. `maker`: the index of the node."""

    maker: int
    nbytes: int
    first: int
    last: int
    read_last: int
    read_first: int | None = None
    held: bool = False


def buffers(graph: fx.Graph, donated: Collection[str] = ()) -> Buffers:
    """Predict the buffers of `graph`. Inputs named in `donated` may be written over when they die."""
    return _Predictor(graph, donated).run()


def both_buffers(partition: Partition) -> tuple[Buffers, Buffers]:
    """The buffers of the forward and of the backward, to which the saved tensors are donated; for `Partition.once`."""
    donated = {n.name for n in partition.saved}
    return buffers(partition.forward.graph), buffers(partition.backward.graph, donated)


class _Predictor:
    def __init__(self, graph: fx.Graph, donated: Collection[str]) -> None:
        self.donated = donated
        self.nodes = list(graph.nodes)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.keys = [_keys(n) for n in self.nodes]
        self.view = [self._is_view(i) for i in range(len(self.nodes))]
        self.readers = [[] if v else list(self._readers(i)) for i, v in enumerate(self.view)]
        self.addmms: dict[fx.Node, fx.Node] = {}  # matmuls, and the additions that they do as well
        self.additions: set[fx.Node] = set()
        self.runs = self._runs()
        self.at = self._places()

    def run(self) -> Buffers:
        found: dict[int, _Buffer] = {}
        earliest = self._earliest()
        for i, node in enumerate(self.nodes):
            for key, nbytes in self.keys[i].items():
                if self.runs[i] == i and not self.view[i] and key not in found:
                    found[key] = _Buffer(maker=i, nbytes=nbytes, first=self.at[i], last=self.at[i], read_last=i)
                if key in found:
                    for user in node.users:
                        self._note_reader(found[key], key, user, earliest)
        last = {key: buffer.last for key, buffer in found.items()}
        held = {key for key, buffer in found.items() if buffer.held}
        return Buffers(
            first={key: buffer.first for key, buffer in found.items()},
            last=last,
            read_first={key: buffer.read_first for key, buffer in found.items() if buffer.read_first is not None},
            read_last={key: buffer.read_last for key, buffer in found.items()},
            nbytes={key: buffer.nbytes for key, buffer in found.items()},
            held=frozenset(held),
            in_place=self._in_place({key: buffer.maker for key, buffer in found.items()}, last, held),
        )

    def _note_reader(self, buffer: _Buffer, key: int, user: fx.Node, earliest: list[int]) -> None:
        """Note that `user` reads the buffer, unless it is a view. `copy_` is a view of its target that reads its
        source."""
        reader = self.index[user]
        if user.op == "output":
            buffer.held = True
        elif not self.view[reader] or key not in self.keys[reader]:
            kernel, first = self.runs[reader], min(reader, earliest[reader])
            buffer.read_first = first if buffer.read_first is None else min(buffer.read_first, first)
            buffer.last = max(buffer.last, self.at[kernel])
            buffer.read_last = max(buffer.read_last, kernel)

    def _earliest(self) -> list[int]:
        """Where each node is computed first: what is no buffer, in every kernel that reads it."""
        earliest = list(range(len(self.nodes)))
        for i in reversed(range(len(self.nodes))):
            if self.runs[i] == i or self.nodes[i] in self.addmms:
                earliest[i] = self.at[self.runs[i]]
            else:
                earliest[i] = min((earliest[self.index[r]] for r in self.readers[i]), default=i)
        return earliest

    def _is_view(self, i: int) -> bool:
        inputs = set().union(*(self.keys[self.index[n]] for n in self.nodes[i].all_input_nodes), ())
        return bool(self.keys[i]) and self.keys[i].keys() <= inputs

    def _runs(self) -> list[int]:
        """The index of the node in whose kernel each node is computed; itself where it is a buffer."""
        self._find_addmms()
        realized = self._realized()
        runs = list(range(len(self.nodes)))
        for i in reversed(range(len(self.nodes))):
            if self.nodes[i] in self.addmms:
                runs[i] = self.index[self.addmms[self.nodes[i]]]
            elif not realized[i] and not self.view[i]:
                inside = [runs[self.index[r]] for r in self.readers[i]]
                # A constant runs nowhere: every kernel that wants one makes its own.
                runs[i] = max(inside, default=i + 1) if self.nodes[i].all_input_nodes else i + 1
        return runs

    def _find_addmms(self) -> None:
        for node in self.nodes:
            if (add := addmm(node)) is not None and add not in self.additions:
                self.addmms[node] = add
                self.additions.add(add)

    def _realized(self) -> list[bool]:
        """Which nodes Inductor writes to memory, by its own rules: what a library call or the caller reads, and what
        several readers would have to compute again at too great a cost."""
        realized, reads, sizes = [True] * len(self.nodes), [set[int]() for _ in self.nodes], [0] * len(self.nodes)
        heavy = [False] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            if self.view[i] or not is_inlined(node) or self._is_extern(node):
                continue
            tensor = tensor_of(node)
            on_cpu = tensor is not None and tensor.device.type == "cpu"
            sizes[i], heavy[i] = 1, on_cpu and getattr(node.target, "overloadpacket", None) in HEAVY
            for source in self._sources(i):
                if realized[source]:
                    reads[i].add(source)
                else:
                    reads[i] |= reads[source]
                    sizes[i] += sizes[source]
                    heavy[i] |= heavy[source]
            readers = self.readers[i]
            asked = any(r.op == "output" or self._is_extern(r) for r in readers)
            costly = len(reads[i]) > REUSED_READS or sizes[i] > (25 if on_cpu else 15) or heavy[i]
            realized[i] = asked or len(reads[i]) > (12 if on_cpu else 8) or (len(readers) > 1 and costly)
        return realized

    def _sources(self, i: int) -> list[int]:
        """Indices of what the node reads, through views."""
        work, found = list(self.nodes[i].all_input_nodes), dict[int, None]()
        while work:
            k = self.index[work.pop()]
            if self.view[k]:
                work.extend(self.nodes[k].all_input_nodes[:1])
            elif self.keys[k]:
                found[k] = None
        return list(found)

    def _is_extern(self, node: fx.Node) -> bool:
        return is_extern(node) or node in self.additions

    def _places(self) -> list[int]:
        """The index of the node at which each kernel runs, by the node that it is named by."""
        owner = {key: i for i in range(len(self.nodes) - 1, -1, -1) if self.runs[i] == i for key in self.keys[i]}
        kernels: dict[int, Kernel] = {}
        for i, node in enumerate(self.nodes):
            if node.op != "call_function" or self.view[i] or not self.keys[i]:
                continue
            if self.runs[i] != i and not node.all_input_nodes:
                continue  # a constant is part of whatever reads it
            kernel = kernels.setdefault(self.runs[i], Kernel(self.runs[i], None))
            for source in node.all_input_nodes:
                for key, size in self.keys[self.index[source]].items():
                    if key in owner and owner[key] != kernel.at:
                        kernel.reads[key] = size
        for i, kernel in kernels.items():
            kernel.space = self._space(i)
            kernel.writes = self.keys[i]
            kernel.behind = {owner[key] for key in kernel.reads} & kernels.keys()
        at = list(range(len(self.nodes)))
        for i, place in places(kernels).items():
            at[i] = place
        return at

    def _space(self, i: int) -> object:
        """How many elements a loop goes over, and whether it sums up columns; None for a library call."""
        node = self.nodes[i]
        if self._is_extern(node):
            return None
        sizes = [t.numel() for n in (node, *node.all_input_nodes) if (t := tensor_of(n)) is not None]
        columns = False
        if reduces_in_a_loop(node) and (source := tensor_of(node.all_input_nodes[0])) is not None and source.dim():
            dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []
            columns = bool(dims) and source.dim() - 1 not in {d % source.dim() for d in dims if isinstance(d, int)}
        return (max(map(hint, sizes), default=0), columns)

    def _readers(self, i: int) -> Iterable[fx.Node]:
        """Users of the node, through views of it, each once."""
        work, seen = list(self.nodes[i].users), set[fx.Node]()
        while work:
            user = work.pop()
            if user in seen:
                continue
            seen.add(user)
            if self.view[self.index[user]]:
                work.extend(user.users)
            else:
                yield user

    def _in_place(self, makers: Mapping[int, int], last: Mapping[int, int], held: set[int]) -> frozenset[int]:
        """What a loop writes over an input of the same size that dies there and that no other loop reads there."""
        taken = set()
        dying: dict[int, list[int]] = {}
        for key, readers in self._last_readers(makers, last).items():
            node = self.nodes[makers[key]]
            mine = node.op != "placeholder" or node.name in self.donated
            if mine and key not in held and len(readers) == 1:
                dying.setdefault(readers.pop(), []).append(self.keys[makers[key]][key])
        for key, i in makers.items():
            sizes, size = dying.get(i, []), self.keys[i][key]
            if size in sizes and self.nodes[i].op == "call_function" and not self._is_extern(self.nodes[i]):
                sizes.remove(size)
                taken.add(key)
        return frozenset(taken)

    def _last_readers(self, makers: Mapping[int, int], last: Mapping[int, int]) -> dict[int, set[int]]:
        """The loops that read a buffer when it is read last; those that became one kernel count each."""
        found: dict[int, set[int]] = {}
        for i, node in enumerate(self.nodes):
            for user in node.users:
                reader = self.runs[self.index[user]]
                if user.op != "output" and not self.view[self.index[user]]:
                    for key in self.keys[i].keys() & makers.keys():
                        if self.at[reader] == last[key] and reader != makers[key]:
                            found.setdefault(key, set()).add(reader)
        return found


def _keys(node: fx.Node) -> dict[int, int]:
    """Storages of the node's outputs, with their bytes."""
    keyed = ((storage_key(t), t) for t in tensors_of(node))
    return {key: int(hint(t.untyped_storage().nbytes())) for key, t in keyed if key is not None}
