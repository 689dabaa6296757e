"""Kernels for CUDA draw alike in both graphs where the backward draws again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._inductor import inductor_prims  # defines the operators

from ssd_fx.passes.lowering.random_numbers import shares_seeds

Build = Callable[[fx.Graph], object]
CPU = torch.device("cpu")


def _seed(graph: fx.Graph) -> fx.Node:
    seeds = graph.call_function(inductor_prims.seeds, (2, CPU))
    return graph.call_function(inductor_prims.lookup_seed, (seeds, 1))


def _drawn(graph: fx.Graph, seed: fx.Node) -> fx.Node:
    return graph.call_function(inductor_prims.random, ([4], seed, "rand"))


def drawn_once(graph: fx.Graph) -> object:
    return _drawn(graph, _seed(graph))


def seeds_are_returned(graph: fx.Graph) -> object:
    seed = _seed(graph)
    return _drawn(graph, seed), seed.args[0]


def one_seed_is_returned(graph: fx.Graph) -> object:
    seed = _seed(graph)
    return _drawn(graph, seed), seed


def seeds_come_from_outside(graph: fx.Graph) -> object:
    return _drawn(graph, graph.call_function(inductor_prims.lookup_seed, (graph.placeholder("seeds"), 0)))


def one_seed_comes_from_outside(graph: fx.Graph) -> object:
    return _drawn(graph, graph.placeholder("seed"))


def nothing_is_drawn(graph: fx.Graph) -> object:
    return graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))


@pytest.mark.parametrize(
    ("build", "shared"),
    [
        (drawn_once, False),
        (nothing_is_drawn, False),
        (seeds_are_returned, True),
        (one_seed_is_returned, True),
        (seeds_come_from_outside, True),
        (one_seed_comes_from_outside, True),
    ],
)
def test_which_graphs_share_seeds(build: Build, shared: bool) -> None:
    graph = fx.Graph()
    graph.output(build(graph))
    assert shares_seeds(graph) == shared
