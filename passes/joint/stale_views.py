"""Views whose metadata still knows a tensor that an earlier pass has taken out of the graph.

    relu -> clone -> view       Inductor takes the clone out, as it does what a dropout of 0 leaves behind,
    relu -> view                and by its FakeTensor the view still shares memory with the clone

What shares memory is stored once, so this asks the operator anew what its result shares memory with.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ssd_fx.passes.groups import Layout
from ssd_fx.passes.partition import storage_key, tensors_of

Value = torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]


def rejoin_views(graph: fx.Graph) -> None:
    """Gives views in `graph` the storage of what they view, where it is another one and nothing else changes.

    Symbolic sizes are left alone, for an operator that runs again might guard on them. What is not rejoined is in
    dispute to `alias`, and stays in memory.
    """
    rejoined: set[fx.Node] = set()
    for node in graph.nodes:
        source = _viewed(node, rejoined)
        if source is None or None in (there := _storages(node)) | _storages(source) or there <= _storages(source):
            continue
        found = _anew(node, source)
        if found is not None:
            node.meta["val"] = found
            rejoined.add(node)


def _viewed(node: fx.Node, rejoined: set[fx.Node]) -> fx.Node | None:
    """What `node` is a view of: by its schema, or as an item of views that were rejoined."""
    if not node.args or not isinstance(source := node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return source if source in rejoined else None
    return source if is_view(node) else None


def is_view(node: fx.Node) -> bool:
    """Whether what `node` yields, one tensor or several, is a view of its first argument, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False  # what others run for metadata is theirs to know
    schema = node.target._schema
    views = len(schema.returns) == 1 and schema.returns[0].alias_info is not None
    return views and not schema.is_mutable and schema.arguments[0].alias_info is not None


def _anew(node: fx.Node, source: fx.Node) -> Value | None:
    """The result of `node` on the metadata that its arguments have now; None where it would not be as it was, but for
    its storage, or is no view after all."""
    before = tensors_of(node)
    involved = [*before, *(t for n in node.all_input_nodes for t in tensors_of(n))]
    if any(not isinstance(t, FakeTensor) or Layout.of(t).is_symbolic for t in involved):
        return None
    if len({id(t.fake_mode) for t in involved}) > 1:  # type: ignore[attr-defined]
        return None
    if node.target is operator.getitem:
        found = source.meta["val"][node.args[1]]
    else:
        args, kwargs = tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, (node.args, node.kwargs))
        try:
            with torch.no_grad(), before[0].fake_mode:  # type: ignore[attr-defined]
                found = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):  # no view of these strides is possible: Inductor makes a copy there
            return None
    after = [found] if isinstance(found, torch.Tensor) else list(found)
    alike = [Layout.of(t) for t in after] == [Layout.of(t) for t in before]
    return found if alike and {storage_key(t) for t in after} <= _storages(source) else None


def _storages(node: fx.Node) -> set[int | None]:
    return {storage_key(t) for t in tensors_of(node)}
