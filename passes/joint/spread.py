"""Has the backward compute a tensor again for each of its uses, if these are far apart.

    gelu = f(up)        of layer 1, for the input of layer 3     gelu = f(up)
    ...                 layer 3 and layer 2                      ...
                        `gelu` would be in memory                gelu_twin = f(up)
    mm(gelu)            of layer 1                               mm(gelu_twin)

PyTorch's min-cut computes every node once in the backward, so the tensor would be in memory from its first use to its
last. But a price counts the tensors of a chain as gone when the chain ends (`recompute.price`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from ssd_fx.passes.cost.fusion import CALLS_BETWEEN
from ssd_fx.passes.cost.operators import is_extern, is_inlined, nbytes_of
from ssd_fx.passes.groups import Layout
from ssd_fx.passes.joint.stale_views import run_again
from ssd_fx.passes.partition import RECOMPUTED, Partition, storage_of, tensor_of, written


def spread(partition: Partition) -> None:
    """Compute a tensor once more near a reader that is more than `CALLS_BETWEEN` library calls behind the one before.

    Only tensors that the backward computes again, inside their readers. Their sources must be in memory there anyway,
    or be small beside them.
    """
    sweep = _Sweep(partition.backward.graph)
    for node in list(partition.backward.graph.nodes):
        sweep.visit(node)


@dataclass
class _Twins:
    """Copies to make. `nodes`: the nodes to copy, sources first. `longer`: bytes that would be in memory for longer."""

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    longer: float = 0.0


class _Sweep:
    """Visits the nodes in their order. `now`: the copy that stands for a node from here on."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = list(graph.nodes)
        self.graph = graph
        self.at = {node: i for i, node in enumerate(nodes)}
        self.calls = list(itertools.accumulate(int(is_extern(node)) for node in nodes))
        self.last: dict[int, int] = {}
        for i, node in enumerate(nodes):
            self.last |= {key: i for n in node.all_input_nodes if (key := storage_of(n)) is not None}
        self.changed = {key for node in nodes for n in written(node) if (key := storage_of(n)) is not None}
        self.now: dict[fx.Node, fx.Node] = {}
        self.twinned: set[int | None] = set()
        self.used: dict[int, int] = {}  # by storage: where it, or its copy, was read last

    def visit(self, user: fx.Node) -> None:
        if user.op != "call_function" or _is_view(user):
            return
        for source in user.all_input_nodes:
            self._bring_near(source, user)
        for source in user.all_input_nodes:
            self._use(source, user)
            if source in self.now:
                user.replace_input_with(source, self.now[source])

    def _bring_near(self, source: fx.Node, user: fx.Node) -> None:
        is_of_twin = source not in self.now and storage_of(source) in self.twinned  # another view of a twinned one
        if nbytes_of(source) == 0 or not (is_of_twin or self._is_far(source, user)):
            return
        twins = _Twins()
        if self._find(source, user, twins) and 2 * twins.longer < nbytes_of(source):
            self._make(twins.nodes, user)

    def _is_far(self, source: fx.Node, user: fx.Node) -> bool:
        key = storage_of(source)
        used = self.used.get(key) if key is not None else None
        return used is not None and self.calls[self.at[user] - 1] - self.calls[used] > CALLS_BETWEEN

    def _find(self, source: fx.Node, user: fx.Node, twins: _Twins) -> bool:
        """Add the nodes that must be copied so that `user` reads a copy of `source`; False if that cannot be."""
        if source in twins.nodes:
            return True
        if not _may_be_copied(source) or not self.changed.isdisjoint(map(storage_of, source.all_input_nodes)):
            return False
        for each in source.all_input_nodes:
            key = storage_of(each)
            is_there = each in self.now or key is None or self.last.get(key, -1) >= self.at[user]
            if is_there and not (_may_be_copied(each) and self._is_far(each, user)):
                continue
            if not self._find(each, user, twins) and not is_there:
                twins.longer += nbytes_of(each)
        twins.nodes[source] = None
        return True

    def _make(self, nodes: Iterable[fx.Node], user: fx.Node) -> None:
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.now.get(n, n))
            with self.graph.inserting_before(user):
                twin = self.graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_twin", node.type)
            twin.meta = node.meta.copy()
            found = run_again(twin)
            assert found is not None, "it ran once, with tensors of plain sizes"
            twin.meta["val"] = found
            self.now[node] = twin
            self.twinned.add(storage_of(node))
            for source in node.all_input_nodes:
                self._use(source, user)

    def _use(self, source: fx.Node, user: fx.Node) -> None:
        key = storage_of(source)
        if key is not None:
            self.used[key] = self.at[user]


def _may_be_copied(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    if node.op != "call_function" or RECOMPUTED not in node.meta or tensor is None or Layout.of(tensor).is_symbolic:
        return False
    return _is_view(node) or is_inlined(node)


def _is_view(node: fx.Node) -> bool:
    key = storage_of(node)
    return node.op == "call_function" and key is not None and any(storage_of(n) == key for n in node.all_input_nodes)
