"""How a partitioned graph becomes operators."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ssd_fx.passes.partition import calls_ours
from ssd_fx.passes.planner.step import _behind_items
from tests.passes import toys


def test_no_operator_ends_between_the_items_of_a_call() -> None:
    """native_layer_norm -> three items -> cos: a cut behind the call or behind an item stands behind all of them."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(torch.ops.aten.native_layer_norm.default, (x, [8], None, None, 1e-5))
    items = [graph.call_function(operator.getitem, (call, i)) for i in range(3)]
    graph.call_function(torch.ops.aten.cos.default, (items[0],))
    graph.output(items)
    assert _behind_items(graph, [0, 1, 2, 3, 4, 5, 6]) == {0, 1, 5, 6}


def test_nothing_is_released_between_a_call_and_its_items() -> None:
    """The results are there when the call ends. A plan that frees memory behind the call would be too low."""
    planned = toys.planned(toys.multi_output)
    nodes = list(planned.partition.forward.graph.nodes)
    ours = [n for n in nodes if calls_ours(n)]
    assert ours
    assert not any(n.next.target is operator.getitem for n in ours)
