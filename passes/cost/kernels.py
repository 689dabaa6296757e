"""Which kernels a graph becomes, and what each of its nodes adds to their memory traffic.

    mm -> mul -> add -> mm      mm is a kernel of its own (extern); mul and add become one that
            \\-> sum             reads mm once, writes add for the second mm, and sums up on the way

This is a guess at what Inductor fuses, made before Inductor runs. Nodes between the same externs that read each other
are one kernel. It reads each storage once, and writes what another kernel or the caller reads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ssd_fx.passes.partition import Partition, storage_key, tensors_of

aten = torch.ops.aten

_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
# Operators that read no more of their first input than they yield.
_LOOKUPS = (aten.embedding, aten.gather, aten.index, aten.index_select)
# An operator with fewer output elements than this share of its input's is a reduction.
_REDUCTION = 0.25


@dataclass
class Traffic:
    """What one node adds: bytes read and written, and whether it is the first node of its kernel."""

    read: float = 0.0
    written: float = 0.0
    first: bool = False


class Kernels:
    """The kernels of one graph; `traffic` has an entry for every node that computes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._storages = {n: _storages(n) for n in graph.nodes}
        self._owner: dict[int, fx.Node] = {}
        self._level: dict[fx.Node, int] = {}
        self._parent: dict[fx.Node, fx.Node] = {}
        self._written: set[int] = set()
        self.traffic: dict[fx.Node, Traffic] = {}
        for node in graph.nodes:
            self._place(node)
        self._count(graph)

    def outputs(self, node: fx.Node) -> dict[int, float]:
        """The storages that the node makes, with their bytes; none for a view."""
        return {key: n for key, n in self._storages[node].items() if self._owner.get(key) is node}

    def inputs(self, node: fx.Node) -> dict[int, float]:
        """The storages that the node reads, with the bytes that it reads of each."""
        return {key: n for arg in node.all_input_nodes for key, n in self._storages[arg].items()}

    def _place(self, node: fx.Node) -> None:
        """Find how many externs come before the node, and which kernel it joins."""
        for key in self._storages[node]:
            self._owner.setdefault(key, node)
        if not self.outputs(node) or node.op != "call_function":
            return
        self.traffic[node], self._parent[node] = Traffic(), node
        owners = [o for key in self.inputs(node) if (o := self._owner[key]) in self.traffic]
        self._level[node] = max((self._level[o] + has_flops(o) for o in owners), default=0)
        for owner in owners:
            alike = self._level[owner] == self._level[node] and not has_flops(owner)
            if alike and not has_flops(node):
                self._parent[self._kernel(node)] = self._kernel(owner)

    def _kernel(self, node: fx.Node) -> fx.Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def _count(self, graph: fx.Graph) -> None:
        read_by: dict[fx.Node, set[int]] = {}  # the storages that each kernel has read
        for node in self.traffic:
            kernel = self._kernel(node)
            self.traffic[node].first = kernel not in read_by
            read = read_by.setdefault(kernel, set())
            for key, nbytes in self.inputs(node).items():
                self._count_input(node, key, nbytes, read)
        for key in self.inputs(graph.output_node()):
            self._write(self._owner[key], key)

    def _count_input(self, node: fx.Node, key: int, nbytes: float, read: set[int]) -> None:
        """What reading the storage adds to the traffic. `read`: storages that the node's kernel has read before."""
        owner, traffic = self._owner[key], self.traffic[node]
        if owner in self._parent and self._kernel(owner) is self._kernel(node):
            if _is_reduction(node):  # it goes over its input once more
                traffic.read += nbytes
            return
        if not owner.all_input_nodes and owner.op == "call_function":
            return  # a constant is computed within the kernel
        self._write(owner, key)
        if key not in read or _is_reduction(node):
            traffic.read += _read(node, nbytes, self.outputs(node))
        read.add(key)

    def _write(self, node: fx.Node, key: int) -> None:
        """Count that the kernel of `node` writes the storage; only once."""
        if node in self.traffic and key not in self._written:
            self._written.add(key)
            self.traffic[node].written += self._storages[node][key]


def both_kernels(partition: Partition) -> tuple[Kernels, Kernels]:
    """Those of the forward and of the backward; for `Partition.once`."""
    return Kernels(partition.forward.graph), Kernels(partition.backward.graph)


def has_flops(node: fx.Node) -> bool:
    """Whether the node is a matrix product, convolution or attention: a library call that is priced by its flops.

    Calls of other operators (`operators.is_extern` has them all) are priced by memory traffic, as fused kernels are.
    """
    known = isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket in flop_registry
    return known or is_attention(node)


def is_attention(node: fx.Node) -> bool:
    """Whether the node is one of the fused attention operators, whatever the device."""
    return _is_attention(node.target)


@functools.cache  # a graph has few operators and many nodes
def _is_attention(target: object) -> bool:
    return any(name in str(target) for name in _ATTENTION)


def _is_reduction(node: fx.Node) -> bool:
    if has_flops(node) or getattr(node.target, "overloadpacket", None) in _LOOKUPS:
        return False
    return elements(node) < _REDUCTION * max((elements(n) for n in node.all_input_nodes), default=0.0)


def _read(node: fx.Node, nbytes: float, outputs: dict[int, float]) -> float:
    lookup = getattr(node.target, "overloadpacket", None) in _LOOKUPS
    return min(nbytes, max(outputs.values(), default=0.0)) if lookup else nbytes


def elements(node: fx.Node) -> float:
    """Elements of the largest output."""
    return max((hint(t.numel()) for t in tensors_of(node)), default=0.0)


def _storages(node: fx.Node) -> dict[int, float]:
    """Bytes that a reader of the node reads, by storage. An expanded tensor counts as no more than its storage."""
    found: dict[int, float] = {}
    for tensor in tensors_of(node):
        key = storage_key(tensor)
        if key is not None:
            nbytes = min(hint(tensor.numel()) * tensor.itemsize, hint(tensor.untyped_storage().nbytes()))
            found[key] = max(found.get(key, 0.0), nbytes)
    return found


def hint(value: object) -> float:
    """A size as a number: a symbolic one as it was when the graph was traced."""
    if isinstance(value, torch.SymInt):
        known = value.node.hint  # None where the size depends on data
        return float(known) if known is not None else 0.0
    return float(value)  # type: ignore[arg-type]
