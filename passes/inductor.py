"""What Inductor must be told about our nodes: how a release gives a buffer up, and in which order they run.

Lowering. Inductor frees a buffer, or reuses its memory, after its last use, and knows nothing of a write that is
still going on. The lowering of `wait_store_` therefore drops the buffer itself, right behind the call, and takes it
out of reuse:

    handle = torch.ops.ssd_fx.store.default(buf4, ...)
    ...
    torch.ops.ssd_fx.wait_store_.default(handle, buf4, 7, True)     # True: the graph hands the buffer over
    del buf4

Where the release turns out not to be the last use (it always should be), it hands nothing over and blocks until the
write is done.

Order. Inductor keeps data dependencies only. `PinOrder` runs after fusion, so that it costs none, and chains our
nodes and all extern kernels (matmuls, attention) in the planned order by dependencies that extend no lifetime; what
is fused stays free to move.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch._inductor import custom_graph_pass, ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.lowering import register_lowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map_only

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.partitioner import source_digest

ops = torch.ops.ssd_fx
# Before torch 2.13 a scheduler pass is any callable, and Inductor compiles without its cache when there is one.
_SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


class StoreKernel(ir.FallbackKernel):
    """`store`: `stored` is the realized input, which the release gives up."""

    stored: Any


class ReleaseKernel(ir.FallbackKernel):
    """`wait_store_`: drops its buffer behind the call if nothing uses it later."""

    def codegen(self, wrapper: Any) -> None:
        name = _input_name(self, 1)
        current = V.graph.scheduler.current_node
        assert current is not None
        last = name in current.last_usage and not V.graph.cpp_wrapper
        if not last:
            seq, _, block = self.constant_args
            self.constant_args = (seq, False, block)
        super().codegen(wrapper)
        if last:
            wrapper.freed.add(name)
            wrapper.writeline(f"del {name}")


def _lower_store(x: Any, *args: Any) -> Any:
    # The members of the group are rebuilt from these strides in the backward, so Inductor may not choose others.
    base = V.graph.current_node.args[0]
    assert isinstance(base, torch.fx.Node)
    stride = base.meta["val"].stride()
    x = ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, stride))
    handle = StoreKernel.create(ops.store.default, x, *args)
    _store_of(handle).stored = x
    return tree_map_only(ir.IRNode, ir.TensorBox.create, handle)


def _lower_release(handle: Any, keepalive: Any, seq: int, hand_over: bool = False, block: bool = False) -> None:
    # Whatever the graph says, what is kept alive is the very buffer that was stored: realizing `keepalive` once more
    # could make a copy and protect that.
    store = _store_of(V.graph.name_to_buffer[handle.get_name()])
    ReleaseKernel.create(ops.wait_store_.default, handle, store.stored, seq, hand_over, block)
    release = V.graph.operations[-1]
    assert isinstance(release, ReleaseKernel)
    held, written = _input_name(release, 1), _input_name(store, 0)
    assert held == written, f"Inductor would protect {held} but stores {written}"


def _input_name(kernel: ir.FallbackKernel, index: int) -> str:
    buffer = kernel.inputs[index]
    assert isinstance(buffer, ir.IRNode)
    return buffer.get_name()


def _store_of(handle: Any) -> StoreKernel:
    """The kernel that makes a handle; the handle may be an output node of its own."""
    node = handle if isinstance(handle, StoreKernel) else handle.inputs[0]
    assert isinstance(node, StoreKernel), f"{handle.get_name()} is no handle of a store"
    return node


def register() -> None:
    """Make the lowerings known to Inductor; calling it again changes nothing."""
    register_lowering(ops.store.default, type_promotion_kind=None)(_lower_store)
    register_lowering(ops.wait_store_.default, type_promotion_kind=None)(_lower_release)


@dataclass(frozen=True)
class PinOrder(_SchedulerPass):  # type: ignore[misc]  # the base depends on torch's version
    """Keeps the planned order of our nodes and the extern kernels, through Inductor's own reorder for peak memory."""

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        if not any(_is_ours(n) for n in nodes):
            return nodes
        order = _planned_order(nodes)
        skeleton = [n for n in order if isinstance(n, ExternKernelSchedulerNode)]
        for before, after in itertools.pairwise(skeleton):
            first, second = before.get_outputs()[0].get_name(), after.get_outputs()[0].get_name()
            after.add_fake_dep(WeakDep(first, mutating_buf=second, is_fake=True))
        return order

    def uuid(self) -> str:
        return source_digest()


def _is_ours(node: BaseSchedulerNode) -> bool:
    overload = getattr(node.node, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and overload.namespace == "ssd_fx"


def _planned_order(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """A topological order that follows the FX graph, as far as fusion allows.

    Every node is wanted at the last FX node that it computes, or earlier if a node that needs it is wanted earlier.
    """
    position = {n: i for i, n in enumerate(V.graph.graph.nodes)}
    index = {b.get_name(): i for i, n in enumerate(nodes) for b in n.get_outputs()}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for i, node in enumerate(nodes):
        graph.add_edges_from((index[d.name], i) for d in node.unmet_dependencies if index.get(d.name, i) != i)
    wanted = [_position(n, position) for n in nodes]
    for i in reversed(list(nx.topological_sort(graph))):
        wanted[i] = min([wanted[i], *(wanted[k] for k in graph.successors(i))])
    return [nodes[i] for i in nx.lexicographical_topological_sort(graph, key=wanted.__getitem__)]


def _position(node: BaseSchedulerNode, position: dict[torch.fx.Node, int]) -> int:
    origin = getattr(node.node, "origin_node", None)
    if isinstance(node, ExternKernelSchedulerNode) and isinstance(origin, torch.fx.Node):
        return position.get(origin, len(position))
    origins = [o for n in node.get_nodes() if n.node is not None for o in n.node.get_origins()]
    return max((position[o] for o in origins if o in position), default=len(position))
