"""The predicted kernels of real graphs, held to those that Inductor makes of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._inductor import compile_fx

from ssd_fx.passes.cost.kernels import Kernels
from ssd_fx.passes.cost.traffic import traffic
from tests.passes import real_graphs
from tests.passes.lowered import Lowered, lower

Pairs = set[tuple[str, str]]


def lowered(name: str) -> Iterator[tuple[fx.Graph, Lowered]]:
    """Forward and backward as the partitioner made them, and as Inductor lowered them."""
    graphs: list[fx.Graph] = []
    real = compile_fx.fx_codegen_and_compile

    def spy(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> object:
        graphs.append(copy.deepcopy(gm.graph))
        return real(gm, *args, **kwargs)

    model, run = real_graphs.MODELS[name]()
    model.train()
    with mock.patch.object(compile_fx, "fx_codegen_and_compile", spy):
        found = lower(lambda x: run(model), torch.zeros(1))
    yield from zip(graphs, found, strict=True)


def pairs(kernels: Iterable[Iterable[str]], known: set[str]) -> Pairs:
    """What is computed together."""
    return {pair for names in kernels for pair in itertools.combinations(sorted(known.intersection(names)), 2)}


def predicted_loops(kernels: Kernels) -> list[set[str]]:
    found: dict[int, set[str]] = {}
    for i, node in enumerate(kernels.nodes):
        for kernel in kernels.kernels(i) if kernels.computes[i] else ():
            found.setdefault(kernel, set()).add(node.name)
    return [names for kernel, names in found.items() if kernel not in kernels.calls]


def made_loops(graph: Lowered) -> list[set[str]]:
    loops = [[n.node for n in kernel.get_nodes() if n.node] for kernel in graph.kernels if not kernel.is_extern()]
    return [{origin.name for node in nodes for origin in node.get_origins()} for nodes in loops]


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.zoo]) for name in ("bert", "t5", "vit"))]
)
def test_what_is_fused_and_moved_is_what_inductor_fuses_and_moves(name: str) -> None:
    """Of the pairs of nodes that are predicted to be computed together at least 80% are, and 80% of those that are were
    predicted; bytes are within an eighth."""
    if reason := real_graphs.missing(name):
        pytest.skip(reason)
    for graph, found in lowered(name):
        kernels = Kernels(graph)
        guessed, made = predicted_loops(kernels), made_loops(found)
        known = set().union(*guessed) & set().union(*made)
        together, really = pairs(guessed, known), pairs(made, known)
        assert len(together & really) >= 0.8 * max(len(together), len(really))
        moved = sum(t.read + t.written for t in traffic(kernels).values())
        assert moved == pytest.approx(found.moved_bytes, rel=0.125)
