"""How the stored tensor is made from its base in the forward, and the members from the loaded tensor in the backward.

    forward     base -> view -> slice -> slice -> clone -> store      only the bytes needed
    backward    load -> as_strided                                    a member of the same dtype
                load -> as_strided -> view(dtype) -> as_strided -> _conj    one of another dtype, lazily conjugated

Every node gets its FakeTensor by running its operator on those of its arguments. So the FakeTensors of a rewritten
graph share storages as its tensors will.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.compat import FakeTensorMode, OpOverload, detect_fake_mode, tree_map_only
from ssd_fx.passes.groups import AliasGroup, Layout
from ssd_fx.passes.partition import storage_key, tensor_of, tensors_of

aten = torch.ops.aten


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode of the graph's FakeTensors; all of them have the same one."""
    mode = detect_fake_mode(next((n.meta["val"] for n in graph.nodes if tensor_of(n) is not None), None))
    assert mode is not None, "a partitioned graph has FakeTensors"
    return mode


def first_compute(nodes: list[fx.Node]) -> fx.Node:
    return next(n for n in nodes if n.op != "placeholder")


def stand_in(mode: FakeTensorMode, saved: torch.Tensor) -> torch.Tensor:
    """The FakeTensor of the stand-in that is saved instead of `saved`."""
    with mode:
        made: torch.Tensor = torch.ops.ssd_fx.stand_in(saved.shape, saved.dtype, saved.device)
    return made


def call(graph: fx.Graph, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """A node at the graph's insertion point, with its FakeTensor."""
    node = graph.call_function(target, args, kwargs)
    infer(node, fake_mode(graph))
    return node


def infer(node: fx.Node, mode: FakeTensorMode) -> None:
    """Set `meta["val"]` of a node from those of its arguments."""
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta["val"], (node.args, node.kwargs))
    with mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def packed(graph: fx.Graph, base: fx.Node, group: AliasGroup) -> fx.Node:
    """The node that a store writes: the base, or what the group's `pack` makes of it."""
    pack = group.pack
    if pack is None:
        return base
    node = base
    if pack.order != tuple(sorted(pack.order)):
        node = call(graph, aten.permute.default, node, list(pack.order))
    if pack.box is not None:
        # no view: a kernel may return other strides than its FakeTensor has
        node = call(graph, aten.reshape.default, node, [node.meta["val"].numel() // pack.box.row, pack.box.row])
        node = call(graph, aten.slice.Tensor, node, 0, *pack.box.rows)
        node = call(graph, aten.slice.Tensor, node, 1, *pack.box.columns)
    if pack.copy:
        node = call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
    return node


class Sizes:
    """Sizes and strides as arguments of nodes: numbers, or nodes of the graph that compute the symbolic ones."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes: dict[object, fx.Node | int] = {}

    def prepare(self, values: Iterable[int | torch.SymInt]) -> None:
        """Make the nodes for these values at the graph's insertion point. Each call scans the whole graph."""
        new = {v.node.expr: v for v in values if isinstance(v, torch.SymInt) and v.node.expr not in self._nodes}
        if new:
            self._nodes |= zip(new, self._graph.materialize_symints(list(new.values())), strict=True)

    def of(self, values: Sequence[int | torch.SymInt]) -> list[fx.Node | int]:
        return [self._nodes[v.node.expr] if isinstance(v, torch.SymInt) else v for v in values]


def member(graph: fx.Graph, source: fx.Node, held: Layout, wanted: Layout, sizes: Sizes) -> fx.Node:
    """A node of layout `wanted` on the bytes of `source`, which is dense and has layout `held`."""
    node = source
    if wanted.dtype != held.dtype:
        whole = max(1, wanted.dtype.itemsize // held.dtype.itemsize)  # a view takes no part of a larger element
        flat = call(graph, aten.as_strided.default, node, [held.numel // whole * whole], [1], 0)
        node = call(graph, aten.view.dtype, flat, wanted.dtype)
    if node is not source or not same_view(held, wanted):
        where = (sizes.of(wanted.size), sizes.of(wanted.stride), *sizes.of([wanted.offset]))
        node = call(graph, aten.as_strided.default, node, *where)
    if wanted.conj:
        node = call(graph, aten._conj.default, node)
    if wanted.neg:
        node = call(graph, aten._neg_view.default, node)
    return node


def same_view(a: Layout, b: Layout) -> bool:
    """Whether two layouts have the same sizes, strides and offset for certain; asking adds no guard."""
    return bool(statically_known_true(sym_eq(a.numbers, b.numbers)))


def refresh(replaced: fx.Node, old: int, mode: FakeTensorMode) -> None:
    """Infer the FakeTensors of a rebuilt tensor's views again: they still have `old`, the storage that was saved."""
    work = [replaced]
    while work:
        for user in work.pop(0).users:
            if any(storage_key(v) == old for v in tensors_of(user)):
                _infer_view(user, mode)
                work.append(user)


def _infer_view(node: fx.Node, mode: FakeTensorMode) -> None:
    """Like `infer`. A view that other strides do not allow becomes a reshape, as Inductor makes of every view."""
    try:
        infer(node, mode)
    except (RuntimeError, ValueError):
        if node.target is not aten.view.default:
            raise
        node.target = aten.reshape.default
        infer(node, mode)
