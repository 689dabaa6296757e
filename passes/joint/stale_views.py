"""Views whose metadata still names the storage of a tensor that an earlier pass took out of the graph.

    traced          relu -> clone -> view       the clone is what a dropout of 0 becomes, for example
    after Inductor  relu -> view                the FakeTensor of view still shares its storage with clone
    rejoin_views    relu -> view                it shares its storage with relu

    traced          mm; mm_1 -> unsqueeze       mm and mm_1 are equal expressions
    merge_equal     mm -> unsqueeze             unsqueeze shares its storage with mm

Tensors of one storage are stored once, so metadata must be right about that. This pass runs the view's operator once
more, on the FakeTensor of its argument.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ssd_fx.compat import FakeTensor, OpOverload, functorch_config, fx_graph_cse, tree_map
from ssd_fx.passes.groups import Layout
from ssd_fx.passes.partition import storage_key, tensors_of

Value = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]


def rejoin_views(graph: fx.Graph) -> None:
    """Give views in `graph` the storage of the tensor that they view, if they have another and nothing else changes.

    Views with symbolic sizes stay as they are, because an operator that runs again might add guards. `alias` keeps in
    memory the views whose metadata stay wrong.
    """
    for node in graph.nodes:
        source = _viewed(node)
        if source is None:
            continue
        has = _storages(node)
        wanted = _storages(source)
        if None in has | wanted or has <= wanted:
            continue
        found = _inferred(node, source)
        if found is not None:
            node.meta["val"] = found


def merge_equal(graph: fx.Graph) -> fx.Graph:
    """A joint graph in which equal expressions are merged, as PyTorch's min-cut would do next, with its views rejoined.

    The min-cut would leave views with storages that no node of its graphs has.
    """
    if not functorch_config.cse:
        return graph
    merged = fx_graph_cse(graph)
    rejoin_views(merged)
    return merged


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that `node` is a view of, by its schema; for an item of a tuple of views, the node of the tuple."""
    if not node.args or not isinstance(source := node.args[0], fx.Node):
        return None
    return source if is_view(source if node.target is operator.getitem else node) else None


def is_view(node: fx.Node) -> bool:
    """Whether all tensors that `node` yields are views of its first argument, by its schema."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False  # other libraries' functions for metadata may have effects: they do not run a second time
    return node.target.is_view


def _inferred(node: fx.Node, source: fx.Node) -> Value | None:
    """The result of `node` for the metadata that its arguments have now.

    None where more than the storage would change, or where the result is no view of `source`.
    """
    before = tensors_of(node)
    if not _may_run_again([*before, *(t for n in node.all_input_nodes for t in tensors_of(n))]):
        return None
    found = source.meta["val"][node.args[1]] if node.target is operator.getitem else run_again(node)
    if found is None:
        return None
    after = [found] if isinstance(found, torch.Tensor) else list(found)
    alike = [Layout.of(t) for t in after] == [Layout.of(t) for t in before]
    return found if alike and {storage_key(t) for t in after} <= _storages(source) else None


def _may_run_again(involved: Sequence[torch.Tensor]) -> bool:
    """Whether an operator can run on these tensors without a guard: fake ones of one mode, with plain sizes."""
    if any(not isinstance(t, FakeTensor) or Layout.of(t).is_symbolic for t in involved):
        return False
    return len({id(t.fake_mode) for t in involved}) <= 1  # type: ignore[attr-defined]


def run_again(node: fx.Node) -> Value | None:
    """The result that the operator has now; None where the strides allow no view, and Inductor makes a copy."""
    args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
    try:
        with torch.no_grad(), tensors_of(node)[0].fake_mode:  # type: ignore[attr-defined]
            return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]
    except (RuntimeError, ValueError):
        return None


def _storages(node: fx.Node) -> set[int | None]:
    return {storage_key(t) for t in tensors_of(node)}
