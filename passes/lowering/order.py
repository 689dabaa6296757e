"""The order in which the kernels run: the planned one, through everything that Inductor's scheduler does.

Inductor keeps data dependencies only, and then reorders for the lowest estimated peak, which knows nothing of a write
or a read that is going on. `PinOrder` runs after fusion, so that it costs none, puts the kernels in the order of the FX
graph, which is the one that the plan was made for, and chains each to the one before:

    mm -> fused(relu, store's input) -> store -> mm_1 -> fused(relu_1) -> wait_store_ -> ...

The links extend no lifetime and are seen by no code generator. A kernel that computes several FX nodes runs at the last
of them, or earlier where a kernel that needs it does.

`KeepCommunication` runs before fusion. Inductor keeps its own collectives in the order of the graph
(`comms.decide_global_ordering_of_comms`), and fuses nothing that would turn them round; this does so for other
operators that may communicate. Ranks whose plans differ fuse differently, and must still agree on that order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import networkx as nx
import torch
from torch._inductor import custom_graph_pass, ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V

from ssd_fx.passes.joint.collectives import may_communicate
from ssd_fx.passes.verify.errors import require

# Before torch 2.13 a scheduler pass may be any callable; the cache of Inductor takes what is of a graph pass's class.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)


@dataclass(frozen=True)
class PinOrder(_SchedulerPass):  # type: ignore[misc]  # the base depends on torch's version
    """Makes the planned order the only one that Inductor's later passes can choose, in graphs that hold our nodes;
    `before` is the user's pass at this place. `version`: of the package's source, for compile caches."""

    version: str
    before: Any = None

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        nodes = nodes if self.before is None else self.before(nodes)
        if not any(is_ours(n) for n in nodes):
            return nodes
        order = planned_order(nodes)
        for before, after in _links(order):
            _pin(before, after)
        return order

    def uuid(self) -> str:
        return self.version + _uuid(self.before)


@dataclass(frozen=True)
class KeepCommunication(_SchedulerPass):  # type: ignore[misc]  # the base depends on torch's version
    """Chains what may talk to other ranks in the order of the graph; `version`, `before` as of `PinOrder`."""

    version: str
    before: Any = None

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        nodes = nodes if self.before is None else self.before(nodes)
        lowered = {id(operation): i for i, operation in enumerate(V.graph.operations)}  # as Inductor orders its own
        talking = sorted((n for n in nodes if _may_communicate(n)), key=lambda n: lowered[id(n.node)])
        for first, second in itertools.pairwise(talking):
            _pin(first, second)
        if len(talking) > 1:  # fusion asks for ancestors whether it would close a circle
            talking[0].scheduler.compute_ancestors()
        return nodes

    def uuid(self) -> str:
        return self.version + _uuid(self.before)


def _uuid(before: Any) -> str:
    """Of the user's pass; one that has none has another one every time, so that no cache finds what it was used for."""
    if before is None:
        return ""
    return str(before.uuid()) if hasattr(before, "uuid") else uuid4().hex


def _may_communicate(node: BaseSchedulerNode) -> bool:
    return may_communicate(getattr(node.node, "op_overload", None))


def is_ours(node: BaseSchedulerNode) -> bool:
    """Whether it calls one of our operators, or takes what such a call returns."""
    kernel = node.node.inputs[0] if isinstance(node.node, ir.MultiOutput) else node.node
    overload = getattr(kernel, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and overload.namespace == "ssd_fx"


def planned_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """A topological order that follows the FX graph, as far as fusion allows.

    Every node is wanted at the last FX node that it computes, or earlier if a node that needs it is wanted earlier.

    Raises:
        VerifyError: no such order has our nodes in the planned one.
    """
    position = {n: i for i, n in enumerate(V.graph.graph.nodes)}
    index = {b.get_name(): i for i, n in enumerate(nodes) for b in n.get_outputs()}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for i, node in enumerate(nodes):
        graph.add_edges_from((index[d.name], i) for d in node.unmet_dependencies if index.get(d.name, i) != i)
    graph.add_edges_from(_behind_their_wait(nodes))
    ours = sorted((i for i, n in enumerate(nodes) if is_ours(n)), key=lambda i: _position(nodes[i], position))
    graph.add_edges_from(itertools.pairwise(ours))  # one that a fused kernel needs early takes those before it along
    _release_behind_readers(graph, nodes, position)
    if not nx.is_directed_acyclic_graph(graph):
        circle = " -> ".join(_named(nodes[before]) for before, _ in nx.find_cycle(graph))
        text = (
            "no order has the nodes of ours as they are planned: each of these would run before the next, in a circle"
        )
        require(False, f"{text}: {circle}", "order")
    wanted = [_position(n, position) for n in nodes]
    for i in reversed(list(nx.topological_sort(graph))):
        wanted[i] = min([wanted[i], *(wanted[k] for k in graph.successors(i))])
    return [nodes[i] for i in nx.lexicographical_topological_sort(graph, key=wanted.__getitem__)]


def _release_behind_readers(
    graph: nx.DiGraph[int], nodes: list[BaseSchedulerNode], position: dict[torch.fx.Node, int]
) -> None:
    """Adds an edge from each kernel that reads what is released, but is planned behind the release, to that release.

    No FX node reads behind a release, but Inductor may compute a reader where another kernel uses it. A release that is
    not the last use hands nothing over and blocks. So such a kernel runs before it, if what must come along is
    loops only: moving library calls, or others of ours, would undo the plan.
    """
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in {d.name for d in node.read_writes.reads} if not is_ours(node) else ():
            readers.setdefault(name, []).append(i)
    for i, node in enumerate(nodes):
        at = _position(node, position)
        for reader in readers.get(_released(node), []):
            if _position(nodes[reader], position) > at:
                along = [
                    nodes[k] for k in (reader, *nx.ancestors(graph, reader)) if _position(nodes[k], position) >= at
                ]
                if not any(is_ours(n) or n.is_extern() for n in along):
                    graph.add_edge(reader, i)


def _released(node: BaseSchedulerNode) -> str:
    """The buffer that a release is about; empty for other nodes."""
    release = _calls(node, torch.ops.ssd_fx.wait_store_.default)
    kept = node.node.inputs[1] if release and isinstance(node.node, ir.FallbackKernel) else None
    return str(kept.get_name()) if isinstance(kept, ir.IRNode) else ""


def _named(node: BaseSchedulerNode) -> str:
    """The FX nodes that it computes; of a library call, the call alone."""
    call = _call(node)
    return call.name if call is not None else " + ".join(sorted(o.name for o in _origins(node))) or node.get_name()


def _call(node: BaseSchedulerNode) -> torch.fx.Node | None:
    """The FX node of a library call. An operator that changes nothing, such as an `expand` to the same sizes, puts
    itself into its place in `origin_node`, and not into the origins."""
    call = getattr(node.node, "origin_node", None)
    return call if isinstance(call, torch.fx.Node) and call in _origins(node) else None


def _origins(node: BaseSchedulerNode) -> set[torch.fx.Node]:
    return {o for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()}


def _behind_their_wait(nodes: list[BaseSchedulerNode]) -> Iterator[tuple[int, int]]:
    """Indices of every wait for a load, and of every kernel that reads what was loaded.

    A wait changes its buffer, so a reader of it depends on the wait; but Inductor on the CPU forgets that of a kernel
    whose loops it splits to fuse it with another (torch 2.13, `SchedulerNode.recompute_size_and_body`).
    """
    waits = {m: i for i, n in enumerate(nodes) if _is_wait(n) for b in n.get_outputs() for m in b.get_mutations()}
    for i, node in enumerate(nodes):
        if not is_ours(node):
            yield from ((waits[d.name], i) for d in node.read_writes.reads if d.name in waits)


def _is_wait(node: BaseSchedulerNode) -> bool:
    return _calls(node, torch.ops.ssd_fx.wait_load_.default)


def _calls(node: BaseSchedulerNode, overload: torch._ops.OpOverload) -> bool:
    return getattr(node.node, "op_overload", None) is overload


def _position(node: BaseSchedulerNode, position: dict[torch.fx.Node, int]) -> int:
    call = _call(node) if isinstance(node, ExternKernelSchedulerNode) else None
    computed = _origins(node) if call is None else {call}
    return max((position[o] for o in computed if o in position), default=len(position))


def _links(order: list[BaseSchedulerNode]) -> Iterator[tuple[BaseSchedulerNode, BaseSchedulerNode]]:
    """Pairs that, chained, keep `order`.

    Inductor replaces or drops some nodes after this pass, and their links with them: a node behind such ones is chained
    to them and to the last one before them that stays.
    """
    before: list[BaseSchedulerNode] = []
    for node in order:
        yield from ((b, node) for b in before)
        before = [*before, node] if _may_be_replaced(node) else [node]


def _may_be_replaced(node: BaseSchedulerNode) -> bool:
    return isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiTemplateBuffer)


def _pin(before: BaseSchedulerNode, after: BaseSchedulerNode) -> None:
    first, second = before.get_outputs()[0].get_name(), after.get_outputs()[0].get_name()
    link = WeakDep(first, mutating_buf=second, is_fake=True)
    if isinstance(after, FusedSchedulerNode):
        # It refuses `add_fake_dep`, because its dependencies are derived from its parts; they are final by now.
        after.read_writes = after.read_writes.with_read(link)
        after.unmet_dependencies = after.unmet_dependencies | {link}
    else:
        after.add_fake_dep(link)
