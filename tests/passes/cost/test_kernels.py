"""The predicted kernels of real graphs, held to those that Inductor makes of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.passes.cost.kernels import Kernels
from ssd_fx.passes.cost.roofline import traffic
from tests.passes import real_graphs
from tests.passes.lowered import Lowered, lower, lower_alone

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


def scaled(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As a group norm is decomposed: `as_strided` makes one factor and one term of a channel of its statistics."""
    factor = rstd * weight
    term = bias - mean * factor
    factor, term = (t.as_strided((8, 32, 1), (32, 1, 1)) for t in (factor, term))
    y = x * factor + term
    return torch.bmm(y.sin(), x.permute(0, 2, 1)), torch.bmm(y.cos(), x.permute(0, 2, 1))


def test_what_as_strided_views_is_written() -> None:
    """So its reader reads two tensors, not four, and is computed again by each of its own readers."""
    args = torch.randn(8, 32, 16), *(torch.randn(8, 32) for _ in range(4))
    graph = make_fx(scaled, tracing_mode="fake")(*args).graph
    kernels = Kernels(graph)
    loops = {kernels.nodes[i].name for i in kernels.maker.values() if kernels.computes[i]} - {"bmm", "bmm_1"}
    assert loops == {"mul", "sub", "sin", "cos"}
    written = [n for kernel in lower_alone(scaled, *args).kernels if not kernel.is_extern() for n in kernel.get_nodes()]
    assert len(written) == len(loops)


def chained(x: Tensor) -> tuple[Tensor, Tensor]:
    """Six operations on one tensor, whose result two loops read."""
    y = (((x + 1).abs() + 2).abs() + 3).abs()
    return y.sum(0), y.sum(1)


@pytest.mark.parametrize("most", [None, 5])
def test_how_much_is_computed_by_each_reader_is_a_setting_of_inductor(most: int | None) -> None:
    x = torch.randn(64, 64)
    with inductor_config.patch(realize_opcount_threshold=most):
        kernels = Kernels(make_fx(chained, tracing_mode="fake")(x).graph)
        written = [node for kernel in lower_alone(chained, x).kernels for node in kernel.get_nodes()]
    loops = {kernels.nodes[i].name for i in kernels.maker.values() if kernels.computes[i]}
    assert loops == {"sum_1", "sum_2"} | ({"abs_3"} if most else set())
    assert len(written) == len(loops)


def rolled(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`at` is returned, and reads nothing. Were it read, `y` would read five tensors, one too many to be inlined."""
    at = torch.fmod(torch.ops.prims.iota(16, start=2, step=1, dtype=torch.int64, device="cpu", requires_grad=False), 16)
    y = a[at] * b + c * d
    return at, y.sin(), y.cos()


def windows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What is read window by window needs nested loops over its rows. A sum of columns needs none of them."""
    y = x.view(2, 4, 4, 8, 8, 32).permute(0, 1, 3, 2, 4, 5).reshape(2, 1024, 32)
    turned = y * weight
    return turned.sum(2, keepdim=True) * turned, (y * 2).sum((0, 1))


def modulated(x: Tensor, y: Tensor, z: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Inductor counts five reads, two of them of `factors`: one too many to be inlined."""
    a, b = factors.chunk(2, 1)
    total = x + a * y + b * z
    return total.sin(), total.cos()


@pytest.mark.parametrize(
    ("run", "shapes"),
    [
        (rolled, [(16, 64)] * 4),
        (windows, [(32, 64, 32), (2, 1024, 32)]),
        (modulated, [(16, 64), (16, 64), (16, 64), (16, 128)]),
    ],
    ids=lambda run: getattr(run, "__name__", ""),
)
def test_loops_are_those_of_inductor(run: Callable[..., object], shapes: list[tuple[int, ...]]) -> None:
    args = [torch.randn(shape) for shape in shapes]
    kernels = Kernels(make_fx(run, tracing_mode="fake")(*args).graph)
    predicted: dict[int, set[str]] = {}
    for i, kernel in kernels.kernel.items():
        predicted.setdefault(kernel, set()).add(kernels.nodes[i].name)
    made = [{node.node.origin_node.name for node in k.get_nodes()} for k in lower_alone(run, *args).kernels]
    assert sorted(map(sorted, predicted.values())) == sorted(map(sorted, made))


def scattered(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    at, at_other = (torch.ops.prims.convert_element_type(t.select(1, 0) * 0, torch.int64) for t in (x, other))
    zeros, y = torch.full((64, 32), 0.0, dtype=torch.float32), x.relu()
    return zeros.index_put([at], y, accumulate=True) + 1, y <= 0, zeros.index_put([at_other], other, accumulate=True)


def test_a_scattered_sum_is_a_loop_that_its_readers_do_not_join() -> None:
    """Nor do two sums become one kernel because they begin from the same zeros: a loop for each fills its own."""
    args = torch.randn(64, 32), torch.randn(64, 32)
    kernels = Kernels(make_fx(scattered, tracing_mode="fake")(*args).graph)
    of = {kernels.nodes[i].name: kernel for i, kernel in kernels.kernel.items()}
    assert of["index_put"] == of["le"] not in (of["add"], of["index_put_1"])
    fills = 2
    assert len(lower_alone(scattered, *args).kernels) == fills + len({of["le"], of["add"], of["index_put_1"]})


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_put([x > 0], torch.ones(()), accumulate=True),
        lambda x: x.index_put([x.sign().long()], x, accumulate=False),
        lambda x: x.long().index_put([x.sign().long()], x.long(), accumulate=True),
    ],
    ids=["at a mask", "not added", "of integers"],
)
def test_what_is_not_added_up_in_a_loop_is_a_call(write: Callable[[Tensor], Tensor]) -> None:
    kernels = Kernels(make_fx(write, tracing_mode="fake")(torch.rand(8)).graph)
    assert "index_put" in {kernels.nodes[i].name for i in kernels.calls}


def test_a_tensor_is_added_to_itself() -> None:
    traced = make_fx(lambda x: x.index_put([x.long()], x, accumulate=True), tracing_mode="fake")(torch.rand(8))
    kernels = Kernels(traced.graph)
    assert "index_put" in {kernels.nodes[i].name for i in kernels.kernel}
