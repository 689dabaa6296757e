"""Which nodes of a graph will be buffers of Inductor's, when those live, and what that adds up to.

    mm -> add -> gelu -> mm         add lives in registers: one kernel computes it with gelu
      \\                            mm, gelu are buffers: what an extern kernel or the caller reads, somebody must write

Inductor decides that later; what is predicted here decides only where memory is thought to be short.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ssd_fx.passes.kernels import has_flops, hint
from ssd_fx.passes.partition import storage_key, tensor_of

aten, prims = torch.ops.aten, torch.ops.prims

# What Inductor computes inside whatever kernel reads it, besides what is tagged pointwise.
_INLINED = frozenset(
    {
        aten.full, aten.scalar_tensor, aten.arange, aten.embedding, aten.index, aten.gather, aten.constant_pad_nd,
        aten.slice_scatter, aten.select_scatter, aten.clone, aten._to_copy, aten.copy, aten.cat, aten.where, prims.iota,
        prims.convert_element_type, aten.full_like, aten.zeros_like, aten.ones_like, aten.fill,
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.var, aten.any, aten.all, aten.prod, aten.argmax}
)

_HEAVY = frozenset({aten.exp, aten.sigmoid, aten.tanh, aten.log, aten.pow})
_LARGE = 16  # nodes that several kernels will not each compute


def is_inlined(node: fx.Node) -> bool:
    """Whether Inductor can compute the node inside a kernel that reads it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _INLINED


def is_extern(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own, which reads and writes buffers."""
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return not _is_getitem(node) and tensor_of(node) is not None
    return has_flops(node) or not (is_inlined(node) or node.target.overloadpacket in _REDUCTIONS)


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


@dataclass(frozen=True)
class Buffers:
    """The storages of one graph that will be memory, by storage key.

    `first`, `last`: indices of the nodes in whose kernels a buffer is written and read last (the output is no reader);
    `nbytes`: its size; `held`: what the output returns; `in_place`: what a kernel writes over an input that dies there.
    """

    first: Mapping[int, int]
    last: Mapping[int, int]
    nbytes: Mapping[int, int]
    held: frozenset[int]
    in_place: frozenset[int]

    def alive(self, keys: Iterable[int], count: int) -> list[int]:
        """Bytes of the buffers `keys` during every one of `count` nodes."""
        change = [0] * (count + 1)
        for key in keys:
            last = count - 1 if key in self.held else self.last[key]
            change[min(self.first[key] + (key in self.in_place), last)] += self.nbytes[key]
            change[last + 1] -= self.nbytes[key]
        return list(itertools.accumulate(change))[:count]


def buffers(graph: fx.Graph, donated: Collection[str] = ()) -> Buffers:
    """Predict the buffers of `graph`; inputs named in `donated` are given away, and written over when they die."""
    return _Predictor(graph, donated).run()


class _Predictor:
    def __init__(self, graph: fx.Graph, donated: Collection[str]) -> None:
        self.donated = donated
        self.nodes = list(graph.nodes)
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.keys = [_keys(n) for n in self.nodes]
        self.view = [self._is_view(i) for i in range(len(self.nodes))]
        self.runs = self._runs()

    def run(self) -> Buffers:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        nbytes: dict[int, int] = {}
        held = set()
        for i, node in enumerate(self.nodes):
            for key, size in self.keys[i].items():
                if self.runs[i] == i and key not in first:
                    first[key], last[key], nbytes[key] = i, i, size
                if key not in first:
                    continue
                for user in node.users:
                    if user.op == "output":
                        held.add(key)
                    elif not self.view[self.index[user]]:
                        last[key] = max(last[key], self.runs[self.index[user]])
        return Buffers(first, last, nbytes, frozenset(held), self._in_place(first, last, nbytes, held))

    def _is_view(self, i: int) -> bool:
        inputs = set().union(*(self.keys[self.index[n]] for n in self.nodes[i].all_input_nodes), ())
        return bool(self.keys[i]) and self.keys[i].keys() <= inputs

    def _runs(self) -> list[int]:
        """The index of the node in whose kernel each node is computed; itself where it is a buffer."""
        runs = list(range(len(self.nodes)))
        for i in reversed(range(len(self.nodes))):
            if not self.view[i] and not is_inlined(self.nodes[i]):
                continue
            if not self.nodes[i].all_input_nodes:  # a constant: every kernel that wants one makes its own
                runs[i] = i + 1
                continue
            readers = [self.index[r] for r in self._readers(i)]
            inside = {runs[r] for r in readers}
            written = any(self.nodes[r].op == "output" or is_extern(self.nodes[r]) for r in readers)
            if readers and not self.view[i] and not written and (len(inside) == 1 or self._is_cheap(i)):
                runs[i] = max(inside)
        return runs

    def _is_cheap(self, i: int) -> bool:
        """Whether several kernels would rather compute the node each: it reads one tensor and does little with it."""
        reads: set[int] = set()
        work, seen = [self.nodes[i]], set[fx.Node]()
        while work:
            node = work.pop()
            if node in seen:
                continue
            seen.add(node)
            if getattr(node.target, "overloadpacket", None) in _HEAVY or len(seen) > _LARGE:
                return False
            for source in node.all_input_nodes:
                if self.view[self.index[source]] or is_inlined(source):
                    work.append(source)
                elif tensor_of(source) is not None:
                    reads.add(self.index[source])
        return len(reads) <= 1

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

    def _in_place(
        self, first: Mapping[int, int], last: Mapping[int, int], nbytes: Mapping[int, int], held: set[int]
    ) -> frozenset[int]:
        dying: dict[int, list[int]] = {}
        for key, at in last.items():
            owner = self.nodes[first[key]]
            if first[key] < at and key not in held and (owner.op != "placeholder" or owner.name in self.donated):
                dying.setdefault(at, []).append(nbytes[key])
        taken = set()
        for key, at in first.items():
            sizes = dying.get(at, [])
            if nbytes[key] in sizes and self.nodes[at].op == "call_function" and not is_extern(self.nodes[at]):
                sizes.remove(nbytes[key])
                taken.add(key)
        return frozenset(taken)


def _keys(node: fx.Node) -> dict[int, int]:
    """Storages of the node's outputs, with their bytes."""
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    found = {storage_key(t): int(hint(t.untyped_storage().nbytes())) for t in tensors if storage_key(t) is not None}
    return {k: size for k, size in found.items() if k is not None}
