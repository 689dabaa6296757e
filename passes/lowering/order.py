"""The order in which the kernels run: the planned one, whatever Inductor's scheduler does.

    FX graph       mm, relu, store, mm_1, relu_1, wait_store_
    Inductor       may run wait_store_ before mm_1, since no data dependency forbids it
    PinOrder       mm -> fused(relu) -> store -> mm_1 -> fused(relu_1) -> wait_store_

Inductor keeps data dependencies only. Then it reorders for the lowest estimated peak, which counts no reads or writes
in flight. `PinOrder` runs after fusion, so no fusion is lost. It puts the kernels in the order of the FX graph, for
which the plan was made, and chains each to the one before. These links extend no lifetime, and code generation ignores
them. A kernel that computes several FX nodes runs at the last of them. It runs earlier if a kernel that needs it does,
but not before the place of its inputs. On the CPU our nodes move out of C++ functions (`cpp_functions.py`).

`BeforeFusion` runs before fusion. It chains, in the order of the graph, the operators that may communicate, so that no
fusion reverses that order. Inductor does so for its own collectives only (`comms.decide_global_ordering_of_comms`).
Ranks whose plans differ fuse differently, and must still agree on that order. `BeforeFusion` also keeps loops apart
that are far from each other, as the plan predicts (`cost/fusion.py`): else memory would be alive long before it is
needed.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import networkx as nx
import torch

from ssd_fx.compat import CustomSchedulerPass, OpOverload
from ssd_fx.compat.inductor import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    NopKernelSchedulerNode,
    V,
    WeakDep,
    ir,
)
from ssd_fx.passes.cost.fusion import are_apart
from ssd_fx.passes.cost.sums import RUNNING
from ssd_fx.passes.joint.collectives import may_communicate
from ssd_fx.passes.lowering.cpp_functions import move_out_of_functions
from ssd_fx.passes.lowering.in_place import may_overwrite_loaded
from ssd_fx.passes.partition import RECOMPUTED, calls_ours
from ssd_fx.passes.verify.errors import require


@dataclass(frozen=True)
class _Ordering(CustomSchedulerPass):  # type: ignore[misc]  # the base depends on torch's version
    """`version`: a digest of the package's source, for compile caches. `before`: the user's pass, which runs first."""

    version: str
    before: Any = None

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return self.order(nodes if self.before is None else self.before(nodes))

    @abstractmethod
    def order(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]: ...

    def uuid(self) -> str:
        """The identity in caches. If the user's pass has none, the identity is new each time, so that no cache returns
        an old result."""
        if self.before is None:
            return self.version
        known = self.before.uuid() if hasattr(self.before, "uuid") else None
        return self.version + (uuid4().hex if known is None else str(known))


class PinOrder(_Ordering):
    """Makes the planned order the only one that Inductor's later passes can choose, in graphs with our nodes."""

    def order(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        if not any(is_ours(n) for n in nodes):
            return nodes
        _refuse_plain_calls(nodes)
        may_overwrite_loaded(nodes, [n for n in nodes if called(n.node) == "wait_load_"])
        order = planned_order(nodes)
        for before, after in _links(order):
            if not _is_held_by_data(before, after):
                _pin(before, after)
        return order


class BeforeFusion(_Ordering):
    """Chains, in the order of the graph, the kernels that may communicate, and keeps distant loops apart."""

    def order(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        if nodes:
            _keep_apart(nodes)
        # the order in which the operations were lowered, as Inductor has it for its own collectives
        lowered = {id(operation): i for i, operation in enumerate(V.graph.operations)}
        talks = [n for n in nodes if may_communicate(getattr(n.node, "op_overload", None))]
        chain = sorted(talks, key=lambda n: lowered[id(n.node)])
        for first, second in itertools.pairwise(chain):
            _pin(first, second)
        if len(chain) > 1:  # fusion looks at ancestors to avoid a circle
            chain[0].scheduler.compute_ancestors()
        return nodes


def _keep_apart(nodes: list[BaseSchedulerNode]) -> None:
    """Keeps loops from being fused if they are far apart (`are_apart`), and running sums from readers behind a library
    call.

    If two loops that do not read each other were fused, the later one would run at the place of the earlier. Its
    results, and all tensors that it needs, would be alive from there on. Inductor itself refuses pairs that are 64
    kernels apart. If a running sum were fused with its reader, it would wait for the next term, and so would all terms
    before. If a loop that copies a tensor into a part of a `cat` were fused over a library call, or over a release of
    ours, it would allocate the whole `cat` early.

    Elsewhere our nodes do not count as calls, because the plan predicts fusion without them. But where a wait for a
    load stands behind the first loop, and the second needs that load, the plan has not predicted that the two are
    fused: what the library calls between them read would be loaded, and stay, until that wait.
    """
    calls = sorted(n.min_order for n in nodes if isinstance(n, ExternKernelSchedulerNode) and not is_ours(n))
    again, running = (
        {n.get_name() for n in nodes if mark in getattr(getattr(n.node, "origin_node", None), "meta", ())}
        for mark in (RECOMPUTED, RUNNING)
    )
    releases = sorted(n.min_order for n in nodes if called(n.node) == "wait_store_")
    waits = {n.get_name(): n.min_order for n in nodes if called(n.node) == "wait_load_"}
    scheduler = nodes[0].scheduler
    are_long_distant, can_fuse_vertical = scheduler.are_long_distant_nodes, scheduler.can_fuse_vertical

    def between(one: BaseSchedulerNode, other: BaseSchedulerNode, these: list[int] = calls) -> int:
        end, begin = min(one.max_order, other.max_order), max(one.min_order, other.min_order)
        return bisect(these, begin) - bisect(these, end)

    def would_wait(one: BaseSchedulerNode, other: BaseSchedulerNode) -> bool:
        first, second = sorted((one, other), key=lambda node: node.min_order)
        needed = second.ancestors & waits.keys() if between(one, other) > 0 else ()
        return any(waits[name] > first.max_order for name in needed)

    def far(one: BaseSchedulerNode, other: BaseSchedulerNode) -> bool:
        in_order = sorted((one, other), key=lambda node: node.min_order)
        earlier, later = (not again.isdisjoint(n.get_name() for n in each.get_nodes()) for each in in_order)
        shared = scheduler.score_fusion_memory(one, other)
        written = sum(dep.numbytes_hint() for dep in in_order[1].read_writes.writes)
        apart = are_apart(between(one, other), earlier, later, shared, written) or would_begin_cat(one, other)
        return apart or would_wait(one, other) or are_long_distant(one, other)

    def would_begin_cat(one: BaseSchedulerNode, other: BaseSchedulerNode) -> bool:
        frees = between(one, other) > 0 or between(one, other, releases) > 0
        return frees and _is_part_of_cat(max(one, other, key=lambda node: node.min_order))

    def goes_into(one: BaseSchedulerNode, reader: BaseSchedulerNode, **more: Any) -> bool:
        is_sum = not running.isdisjoint(n.get_name() for n in one.get_nodes())
        apart = (is_sum and between(one, reader) > 0) or would_begin_cat(one, reader) or would_wait(one, reader)
        return not apart and bool(can_fuse_vertical(one, reader, **more))

    # this changes only this scheduler, not its class
    scheduler.are_long_distant_nodes = far  # type: ignore[method-assign,assignment]
    scheduler.can_fuse_vertical = goes_into  # type: ignore[method-assign,assignment]


def _is_part_of_cat(node: BaseSchedulerNode) -> bool:
    layouts = (getattr(part.node, "layout", None) for part in node.get_nodes())
    return any(isinstance(layout, ir.NonOwningLayout) for layout in layouts)


def _refuse_plain_calls(nodes: list[BaseSchedulerNode]) -> None:
    """Check that our operators have our lowerings. Inductor's lite mode drops those of nodes without an annotation.

    Raises:
        VerifyError: an operator of ours is called without its lowering.
    """
    from ssd_fx.passes.lowering.inductor import LOWERINGS  # here, because that file imports this one

    for node in nodes:
        plain = type(node.node) is ir.FallbackKernel and node.node.op_overload in LOWERINGS
        text = "Inductor calls an operator of ssd_fx without its lowering; turn fallback_by_default off"
        require(not plain, f"{text}: {_named(node)}", "inductor")


def is_ours(node: BaseSchedulerNode) -> bool:
    """Whether a kernel calls one of our operators, or takes the result of one apart."""
    return called(node.node.inputs[0] if isinstance(node.node, ir.MultiOutput) else node.node) is not None


def called(kernel: object) -> str | None:
    """The name of our operator that a kernel calls, such as `store`; None for other kernels."""
    overload = getattr(kernel, "op_overload", None)
    if not isinstance(overload, OpOverload) or overload.namespace != "ssd_fx":
        return None
    return str(overload._schema.name.removeprefix("ssd_fx::"))


def argument(kernel: Any, name: str) -> Any:
    """The argument `name` of a kernel that calls one of our operators; it must not be a tensor."""
    args, _ = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
    names = [a.name for a in kernel.op_overload._schema.arguments]
    return args[names.index(name)]


def planned_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """The kernels in the order of the FX graph, as far as data dependencies and fusion allow.

    On the CPU our nodes then move out of C++ functions.

    Every kernel runs at the last FX node that it computes, or at the `cat` that it writes a part of, or earlier if a
    kernel that needs it runs earlier. But it does not move to a place before its inputs. Fusion may join a node at the
    start of the backward to one at the end. If such a kernel ran at the start, all that its second node needs would run
    first, and be alive all the time.

    Raises:
        VerifyError: no order has our nodes as planned.
    """
    in_graph = {n: i for i, n in enumerate(V.graph.graph.nodes)}
    position = [max([_position(n, in_graph), *(in_graph[o] for o in _joined(n) if o in in_graph)]) for n in nodes]
    graph = _constraints(nodes, position)
    _refuse_circle(graph, nodes)
    parts = [[_position(part, in_graph) for part in node.get_nodes()] for node in nodes]
    begins = [0 if _is_fill(n) else min([at, *p]) for n, at, p in zip(nodes, position, parts, strict=True)]
    wanted = _targets(graph, position, begins, {i for n, i in in_graph.items() if _is_added(n)})
    order = [nodes[i] for i in nx.lexicographical_topological_sort(graph, key=wanted.__getitem__)]
    needs = nx.relabel_nodes(graph, dict(enumerate(nodes)))
    needs.add_edges_from(_kept_by_moves(order))
    stay = {n for n in nodes if _waits_for_memory(n)}
    return move_out_of_functions(order, {n for n in nodes if is_ours(n)}, stay, needs)


def _constraints(nodes: list[BaseSchedulerNode], position: list[int]) -> nx.DiGraph[int]:
    """Which kernels must run before which, by their indices."""
    index = {b.get_name(): i for i, n in enumerate(nodes) for b in n.get_outputs()}
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for i, node in enumerate(nodes):
        graph.add_edges_from((index[d.name], i) for d in node.unmet_dependencies if index.get(d.name, i) != i)
    graph.add_edges_from(_readers_of_waits(nodes))
    ours = sorted((i for i, n in enumerate(nodes) if is_ours(n)), key=position.__getitem__)
    graph.add_edges_from(itertools.pairwise(ours))  # our nodes never overtake each other
    _readers_before_release(graph, nodes, position)
    return graph


def _refuse_circle(graph: nx.DiGraph[int], nodes: list[BaseSchedulerNode]) -> None:
    """Check that some order keeps the constraints.

    Raises:
        VerifyError: no order keeps them.
    """
    if nx.is_directed_acyclic_graph(graph):
        return
    circle = " -> ".join(_named(nodes[before]) for before, _ in nx.find_cycle(graph))
    text = "no order has the nodes of ours as they are planned: each of these would run before the next, in a circle"
    require(False, f"{text}: {circle}", "order")


def _targets(graph: nx.DiGraph[int], position: list[int], begins: list[int], added: set[int]) -> list[float]:
    """The positions at which the kernels should run: their own, or the earlier one of a kernel that needs them.

    The kernel that makes an input may run as early as the first node that it computes (`begins`). So no kernel gets a
    position before that node of any kernel that it needs. Nodes that we have `added` may stand right before a kernel.
    If that kernel needs another kernel, the other one runs before the `added` nodes, as in the plan. Else a tensor that
    is loaded there would be in memory during both kernels.
    """
    order = list(nx.topological_sort(graph))
    ready = [0] * len(order)
    for i in order:
        for k in graph.successors(i):
            ready[k] = max(ready[k], ready[i], begins[i])
    wanted: list[float] = list(position)
    for i in reversed(order):
        needed = min((wanted[k] for k in graph.successors(i)), default=math.inf)
        if needed < wanted[i]:
            ahead = next(at for at in itertools.count(math.ceil(needed), -1) if at - 1 not in added)
            wanted[i] = max(ready[i], needed if position[i] in added else min(needed, ahead - 0.5))
    return wanted


def _is_fill(node: BaseSchedulerNode) -> bool:
    """Whether a loop reads nothing, such as one that fills what a scatter writes into. It may run anywhere."""
    return not node.is_extern() and not node.read_writes.reads


def _is_added(node: torch.fx.Node) -> bool:
    """Whether the plan has added a node: it is one of our operators, or rebuilds a saved tensor from a loaded one."""
    rebuilds = node.target is torch.ops.aten.as_strided.default
    return calls_ours(node) or (rebuilds and calls_ours(node.all_input_nodes[0]))


def _readers_before_release(graph: nx.DiGraph[int], nodes: list[BaseSchedulerNode], position: list[int]) -> None:
    """Add an edge to each release from every kernel that reads the released buffer at a later position.

    No FX node reads a buffer after its release. But Inductor may compute a reader of it later, in a kernel that uses
    that reader's result. Without the edge the release is not the last use: it hands nothing over and blocks. The edge
    is added only if loops alone must move with the reader. To move library calls, or others of our nodes, would undo
    the plan.
    """
    readers: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        if not is_ours(node):
            for name in {d.name for d in node.read_writes.reads}:
                readers.setdefault(name, []).append(i)
    for i, node in enumerate(nodes):
        late = [reader for reader in readers.get(_released(node), []) if position[reader] > position[i]]
        for reader in late:
            moved = [nodes[k] for k in (reader, *nx.ancestors(graph, reader)) if position[k] >= position[i]]
            if not any(is_ours(n) or n.is_extern() for n in moved):
                graph.add_edge(reader, i)


def _released(node: BaseSchedulerNode) -> str:
    """The buffer that a release drops; empty for other nodes."""
    kernel = node.node
    if called(kernel) != "wait_store_" or not isinstance(kernel, ir.FallbackKernel):
        return ""
    kept = kernel.inputs[1]
    return str(kept.get_name()) if isinstance(kept, ir.IRNode) else ""


def _kept_by_moves(order: list[BaseSchedulerNode]) -> Iterator[tuple[BaseSchedulerNode, BaseSchedulerNode]]:
    """Pairs of kernels that are in this order for our sake, though no data dependency says so.

    A buffer is read before its release. A tensor is read behind the check that it is no stand-in.
    """
    readers: dict[str, list[BaseSchedulerNode]] = {}
    checks: dict[str, list[BaseSchedulerNode]] = {}
    for node in order:
        names = {d.name for d in node.read_writes.reads}
        if called(node.node) == "refuse_stand_ins":
            for name in names:
                checks.setdefault(name, []).append(node)
        elif not is_ours(node):
            for name in names:
                yield from ((check, node) for check in checks.get(name, ()))
                readers.setdefault(name, []).append(node)
        else:
            yield from ((reader, node) for reader in readers.get(_released(node), ()))


def _waits_for_memory(node: BaseSchedulerNode) -> bool:
    """Whether the limit of memory holds a kernel at its place: a release that blocks, or a load that is strict."""
    kind = called(node.node)
    return (kind == "wait_store_" and argument(node.node, "block")) or (
        kind == "load" and argument(node.node, "strict")
    )


def _named(node: BaseSchedulerNode) -> str:
    """The names of the FX nodes that a kernel computes; for a library call, of the call alone."""
    call = _call(node)
    if call is not None:
        return call.name
    return " + ".join(sorted(o.name for o in _origins(node))) or node.get_name()


def _call(node: BaseSchedulerNode) -> torch.fx.Node | None:
    """The FX node of a library call; None for other kernels.

    That node must be among the origins as well: an operator that changes nothing, such as an `expand` to the same
    sizes, overwrites `origin_node` alone.
    """
    call = getattr(node.node, "origin_node", None)
    return call if isinstance(call, torch.fx.Node) and call in _origins(node) else None


def _origins(node: BaseSchedulerNode) -> set[torch.fx.Node]:
    return {o for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()}


def _joined(node: BaseSchedulerNode) -> set[torch.fx.Node]:
    """The FX nodes of each `cat` that elementwise loops of a kernel write parts of. The whole is in memory from there
    on, and in the plan from its own place on. Other kernels keep their place, or what they read would stay in memory.
    """
    parts: list[Any] = [part.node for part in node.get_nodes()]
    buffers = [part for part in parts if isinstance(getattr(part, "data", None), ir.Pointwise)]
    wholes: list[ir.ConcatKernel] = []
    for buffer in buffers:
        if isinstance(layout := getattr(buffer, "layout", None), ir.NonOwningLayout):
            whole = V.graph.get_buffer(layout.view.get_name())
            if isinstance(whole, ir.ConcatKernel):
                wholes.append(whole)
                buffers.append(whole)  # it may be a part of another
    return {origin for whole in wholes for origin in whole.get_origins()}


def _readers_of_waits(nodes: list[BaseSchedulerNode]) -> Iterator[tuple[int, int]]:
    """Pairs of indices: a wait for a load, and a kernel that reads the loaded tensor.

    A wait mutates its buffer, so its readers depend on it. But Inductor on the CPU forgets that dependency when it
    splits the loops of a kernel to fuse it with another (torch 2.13, `SchedulerNode.recompute_size_and_body`).
    """
    loaded = [(i, n) for i, n in enumerate(nodes) if called(n.node) == "wait_load_"]
    waits = {m: i for i, n in loaded for b in n.get_outputs() for m in b.get_mutations()}
    for i, node in enumerate(nodes):
        if not is_ours(node):
            yield from ((waits[d.name], i) for d in node.read_writes.reads if d.name in waits)


def _position(node: BaseSchedulerNode, in_graph: dict[torch.fx.Node, int]) -> int:
    """The position of the last FX node that a kernel computes; the end of the graph where that is not known."""
    call = _call(node) if isinstance(node, ExternKernelSchedulerNode) else None
    computed = _origins(node) if call is None else {call}
    return max((in_graph[o] for o in computed if o in in_graph), default=len(in_graph))


def _links(order: list[BaseSchedulerNode]) -> Iterator[tuple[BaseSchedulerNode, BaseSchedulerNode]]:
    """The pairs of kernels that must be chained to keep `order`.

    Inductor replaces or drops some kernels after this pass, and their links too. So a kernel after such ones is
    chained to each of them, and to the last one before them that stays.
    """
    before: list[BaseSchedulerNode] = []
    for node in order:
        yield from ((b, node) for b in before)
        before = [*before, node] if _may_be_replaced(node) else [node]


def _may_be_replaced(node: BaseSchedulerNode) -> bool:
    return isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, ir.MultiTemplateBuffer)


def _is_held_by_data(before: BaseSchedulerNode, after: BaseSchedulerNode) -> bool:
    """Whether a loop reads the result of the kernel before it. Then their order holds without a link.

    If the loop had a link too, it would depend on that buffer twice. Inductor would take the loop to read the buffer in
    two ways, and would write nothing over the buffer (`single_index_in_fused_node`, torch 2.13). In a fused kernel a
    link does not count as a read by any of its loops, so such a kernel may have both.
    """
    if is_ours(before) or isinstance(after, FusedSchedulerNode):
        return False
    made = {buffer.get_name() for buffer in before.get_outputs()}
    return any(d.name in made and not isinstance(d, WeakDep) for d in after.unmet_dependencies)


def _pin(before: BaseSchedulerNode, after: BaseSchedulerNode) -> None:
    first = before.get_outputs()[0].get_name()
    second = after.get_outputs()[0].get_name()
    link = WeakDep(first, mutating_buf=second, is_fake=True)
    if isinstance(after, FusedSchedulerNode):
        # A fused kernel refuses `add_fake_dep`, because its dependencies come from its parts. These are final by now.
        after.read_writes = after.read_writes.with_read(link)
        after.unmet_dependencies = after.unmet_dependencies | {link}
    else:
        after.add_fake_dep(link)
