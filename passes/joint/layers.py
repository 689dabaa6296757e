"""Where layers meet: places that few bytes are needed across.

    x0 -> [norm, qkv, attention, proj] -> x1 -> [norm, up, gelu, down] -> x2
        |                                |                              |       few bytes: x0, x1, x2

A checkpoint per layer saves the tensors that are needed across such places, and recomputes all others. The places are
found by bytes alone, without names of modules.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from ssd_fx.passes.cost.operators import is_extern, nbytes_of
from ssd_fx.passes.joint.compared import compared, jumps
from ssd_fx.passes.joint.recompute import may_run_twice
from ssd_fx.passes.partition import Partition, changed_inputs, nodes_by_storage, storage_of, tensor_of

FEWER = 1.5  # a tensor that a kernel computes within itself is saved if its inputs have so many times its bytes
LARGE = 0.25  # a tensor with a smaller share of the bytes across a place is not saved for it
NARROW = 2  # on either side of a place the bytes rise to at least so many times its own


@dataclass(frozen=True)
class Between:
    """Names of nodes. `saved`: those that the forward needs across such places. `again`: those made of these alone."""

    saved: frozenset[str]
    again: frozenset[str]


def between_layers(partition: Partition) -> Between:
    """The nodes to save, and those to compute again from them, so that each layer can be computed again by itself.

    PyTorch's min-cut saves results of the first operators of a layer, such as its norm, and not the layer's input. To
    compute that input again takes all layers before. A tensor that a kernel computes within itself, such as a norm in
    float32, is never in memory, so it does not count as needed across a place. The sum of two tensors is an exception,
    because it is saved in the place of both.
    """
    graph = partition.forward.graph
    at = {node: i for i, node in enumerate(graph.nodes)}
    calls = [0, *itertools.accumulate(int(is_extern(node)) for node in graph.nodes)]
    change = [0.0] * (len(at) + 1)
    spans: list[tuple[int, int, float, fx.Node]] = []
    within: dict[int | None, int] = {}  # where a tensor within a kernel is needed last
    for key, nodes in reversed(nodes_by_storage(graph.nodes).items()):
        made, tensor = nodes[0], tensor_of(nodes[0])
        readers = (user for node in nodes for user in node.users if user.op != "output")
        others = [user for user in readers if storage_of(user) != key]  # a view may be for the backward alone
        if made.op != "call_function" or tensor is None or not others:
            continue
        last, nbytes = max(within.get(storage_of(user), at[user]) for user in others), nbytes_of(made)
        is_within = calls[at[made]] == calls[last + 1]  # no library call reads it, or comes before its last reader
        if is_within and FEWER * nbytes > sum(map(nbytes_of, made.all_input_nodes)):
            within[key] = last
            continue
        change[at[made]] += nbytes
        change[last] -= nbytes
        if tensor.is_floating_point():
            spans.append((at[made], last, nbytes, made))
    widths = list(itertools.accumulate(change[:-1]))
    places = [place for place in valleys(widths) if widths[place]]
    saved = [
        made
        for first, last, nbytes, made in spans
        if any(first <= place < last and nbytes >= LARGE * widths[place] for place in places)
    ]
    names = frozenset(n.name for n in saved)
    return Between(names, made_of(names, partition))


def made_of(saved: Collection[str], partition: Partition) -> frozenset[str]:
    """Names of the nodes that can be computed again from `saved` and trained parameters alone."""
    graph, may = partition.forward.graph, partition.once(reproducible)
    storages = {storage_of(n) for n in graph.nodes if n.name in saved} - {None}
    given = {n for n in graph.nodes if n.op == "placeholder"}  # reproducible nodes read only trained parameters
    known, found = set[fx.Node](), set[str]()
    for node in graph.nodes:
        sources = set(node.all_input_nodes)
        if storage_of(node) in storages or node.name in saved:
            known.add(node)
        elif node.name in may and sources <= known | given:
            if sources <= given:
                given.add(node)
            else:
                known.add(node)
                found.add(node.name)
    return frozenset(found)


def reproducible(partition: Partition) -> frozenset[str]:
    """Names of the nodes that have the same values if the backward computes them from the same arguments: those that
    Inductor computes in a loop or within their readers, and views of these."""
    graph, exact = partition.forward.graph, partition.once(compared)
    unstable = ({storage_of(n) for n in partition.caller_inputs} | changed_inputs(graph)) - {None}
    found = set[str]()
    for node in graph.nodes:
        sources = [storage_of(n) for n in node.all_input_nodes]
        if node.op != "call_function" or node.name in exact or not unstable.isdisjoint(sources):
            continue
        is_view = storage_of(node) is not None and storage_of(node) in sources
        if node.target is operator.getitem and node.all_input_nodes[0].name not in found:
            continue
        if (is_view or not is_extern(node)) and may_run_twice(node) and not jumps(node):
            found.add(node.name)
    return frozenset(found)


def valleys(widths: Sequence[float]) -> list[int]:
    """The lowest places that have higher ones, by the factor `NARROW`, on either side."""
    found: list[int] = []
    lowest: int | None = None  # the lowest place since it was high
    top = 0.0
    for at, width in enumerate(widths):
        if lowest is not None and width < widths[lowest]:
            lowest = at
        elif lowest is not None and width >= NARROW * widths[lowest]:
            found.append(lowest)
            lowest, top = None, width
        elif lowest is None and NARROW * width <= top:
            lowest = at
        else:
            top = max(top, width)
    return found
