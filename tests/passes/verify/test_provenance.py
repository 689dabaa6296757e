"""Who reads a saved tensor reads its own bytes: good graphs with one edge laid elsewhere, all layouts as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from ssd_fx.passes.verify.errors import VerifyError
from ssd_fx.passes.verify.graphs import verify_graphs
from tests.passes import toys

aten, ops = torch.ops.aten, torch.ops.ssd_fx


def two_alike(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> sigmoid -> mm -> sigmoid -> mm: two tensors of one layout are saved."""
    return (((x @ w).sigmoid() @ w).sigmoid() @ w).sum()


def exchange_two_loads(planned: toys.Planned) -> None:
    """All handles go where they should, and whoever reads the one is given the other."""
    second, first = nodes(planned.partition.backward.graph, ops.load.default)  # soonest needed: the other way round
    readers = [[u for u in load.users if u.target is not ops.wait_load_.default] for load in (first, second)]
    wait = next(u for u in first.users if u.target is ops.wait_load_.default)
    other = next(u for u in second.users if u.target is ops.wait_load_.default)
    other.append(wait)  # both have been waited for by then
    for user in readers[0]:
        user.replace_input_with(first, second)
    for user in readers[1]:
        user.replace_input_with(second, first)


def exchange_two_stores(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    first, second = nodes(graph, ops.store.default)
    stored = [first.args[0], second.args[0]]
    ours = [n for n in graph.nodes if n.target in (ops.store.default, ops.wait_store_.default)]
    for node, tensor in zip(ours, [stored[1], stored[0]] * 2, strict=True):
        node.args = tuple(tensor if a in stored else a for a in node.args)
        graph.output_node().prepend(node)


def read_the_neighbour(planned: toys.Planned) -> None:
    """The second third of cat where the first was saved."""
    graph = planned.partition.backward.graph
    view = next(n for n in nodes(graph, aten.as_strided.default) if n.args[3] == 0)
    moved(graph, view, [*view.args[1:3], 8])


def transpose_a_square(planned: toys.Planned) -> None:
    """The right tensor, copied into other strides: its layout is as it was, its elements are not where they were."""
    graph = planned.partition.backward.graph
    load, *_ = nodes(graph, ops.load.default)
    wait = next(u for u in load.users if u.target is ops.wait_load_.default)
    with graph.inserting_after(wait):
        turned = graph.call_function(aten.t.default, (load,))
    with graph.inserting_after(turned):
        copy = graph.call_function(aten.clone.default, (turned,), {"memory_format": torch.contiguous_format})
    turned.meta["val"] = load.meta["val"].t()
    copy.meta["val"] = turned.meta["val"].clone(memory_format=torch.contiguous_format)
    for user in [u for u in load.users if u not in (turned, wait)]:
        user.replace_input_with(load, copy)


def copy_something_else(planned: toys.Planned) -> None:
    """What is copied again is not what the forward copied."""
    graph = planned.partition.backward.graph
    copy = next(n for n in graph.nodes if n.target is aten.clone.default)
    source = copy.args[0]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(copy):
        turned = graph.call_function(aten.t.default, (source,))
    turned.meta["val"] = source.meta["val"].t()
    copy.update_arg(0, turned)


def pack_other_rows(planned: toys.Planned) -> None:
    graph = planned.partition.forward.graph
    packed = next(s.args[0] for s in nodes(graph, ops.store.default) if s.args[0].target is aten.clone.default)
    cut = packed.args[0]
    moved(graph, cut, [cut.args[1], cut.args[2] + 1, cut.args[3] + 1])


def compute_what_was_loaded(planned: toys.Planned) -> None:
    graph = planned.partition.backward.graph
    load, *_ = nodes(graph, ops.load.default)
    wait = next(u for u in load.users if u.target is ops.wait_load_.default)
    with graph.inserting_after(wait):
        other = graph.call_function(aten.neg.default, (load,))
    other.meta["val"] = torch.neg(load.meta["val"])
    for user in [u for u in load.users if u not in (wait, other)]:
        user.replace_input_with(load, other)


def nodes(graph: fx.Graph, target: object) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is target]


def moved(graph: fx.Graph, view: fx.Node, args: list[object]) -> None:
    """The same view with other arguments, and what its FakeTensor then is."""
    view.args = (view.args[0], *args)
    with view.meta["val"].fake_mode:
        view.meta["val"] = view.target(view.args[0].meta["val"], *args)  # type: ignore[operator,union-attr]


BREAKS: list[tuple[toys.Toy, Callable[[toys.Planned], None], str]] = [
    (two_alike, exchange_two_loads, r"'t' reads element \(0, 0\) of 'sigmoid_1' from byte 0 of 'sigmoid', which was"),
    (two_alike, exchange_two_stores, "'ssd_fx_handle_0' stores 'sigmoid_1', which is not of 'sigmoid'"),
    (toys.views_only, read_the_neighbour, "of 't_1' from byte 32 of 'mm_1', which was computed into byte 0 of 'mm_1'"),
    (two_alike, transpose_a_square, r"'\w+' reads element \(1, 0\) of 'sigmoid_1' from byte 4 of 'sigmoid_1', which"),
    (toys.equal_copy, copy_something_else, r"element \(1, 0\) of 't_1' from byte 4 of 'sigmoid', .* into byte 32 of"),
    (toys.slice_of_big_base, pack_other_rows, "of 't' from byte 36 of 'mm', which was computed into byte 32 of 'mm'"),
    (two_alike, compute_what_was_loaded, r"'t' reads element \(0, 0\) of 'sigmoid_1' from byte 0 of 'another storage'"),
]


@pytest.mark.parametrize(("toy", "break_it", "message"), BREAKS, ids=[b.__name__ for _, b, _ in BREAKS])
def test_other_bytes(toy: toys.Toy, break_it: Callable[[toys.Planned], None], message: str) -> None:
    planned = toys.planned(toy)
    verify_graphs(planned.partition, planned.plan, planned.before)
    break_it(planned)
    with pytest.raises(VerifyError, match=message):
        verify_graphs(planned.partition, planned.plan, planned.before)


def saved_and_copied_again(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """PyTorch's cut saves a view of a copy, and computes the copy again in the backward for its other readers."""
    c = (x.sin() * 1).permute(1, 0).split(4)[0]
    d = c.clone().split(2)[0]
    u = (c * c).expand(4, 8).split(2)[1]
    loss = (d * d.detach().cos()).sum() + (d.sin() * d).sum() + (u * u.detach().cos()).sum() + (u.sin() * u).sum()
    return loss * w.sum()


def test_a_copy_that_is_computed_again_is_what_it_was() -> None:
    planned = toys.planned(saved_and_copied_again)
    again = {n.name for n in nodes(planned.partition.backward.graph, aten.clone.default)}
    assert again & {n.name for n in planned.partition.forward.graph.nodes}
    verify_graphs(planned.partition, planned.plan, planned.before)


def cast_and_windows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> cast -> unfold (saved); the backward casts mm again for the product of the two."""
    product = x @ w
    low = product.bfloat16()
    windows = low.unfold(-1, 1, 1)
    return windows.float().sin().sum() + (low * product).relu().sum()


def test_a_cast_that_the_backward_makes_again_is_no_copy() -> None:
    """Both casts have the metadata of one storage, which is stored. Its elements are not those of the product."""
    planned = toys.planned(cast_and_windows)
    names = [n.name for n in planned.partition.backward.graph.nodes]
    assert "_to_copy" in names
    assert "_to_copy" in [g.base for g in planned.plan.offloaded]
