"""What library calls take and give back, by the sizes and strides of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ssd_fx.passes.cost.footprint import buffers
from ssd_fx.passes.cost.kernels import Kernels
from ssd_fx.passes.cost.workspace import workspace_bytes

aten = torch.ops.aten
MIB = 2**20
H200 = (16, 32, 1024, 128)  # batch, heads, rows, columns


def backward(query: Sequence[int], key: Sequence[int], *, copied: bool = False) -> fx.Graph:
    """A graph of one call, in bfloat16 on a GPU. Heads come before rows, but lie behind them in memory; `copied`: not
    in the gradient of the result."""
    graph = fx.Graph()
    with FakeTensorMode():

        def given(name: str, size: Sequence[int], heads_first: bool = False) -> fx.Node:
            batch, heads, rows, columns = size
            order = (batch, heads, rows, columns) if heads_first else (batch, rows, heads, columns)
            made = torch.empty(order, dtype=torch.bfloat16, device="cuda")
            node = graph.placeholder(name)
            node.meta["val"] = made if heads_first else made.transpose(1, 2)
            return node

        nodes = [given("grad", query, copied), given("query", query), given("key", key), given("value", key)]
        nodes += [given("out", query)]
        sums = graph.placeholder("sums")
        sums.meta["val"] = torch.empty(query[:3], dtype=torch.float32, device="cuda")
        rows, columns = query[2], key[2]
        rest = (None, None, rows, columns, 0.0, True, sums, sums)
        call = graph.call_function(aten._scaled_dot_product_flash_attention_backward.default, (*nodes, sums, *rest))
        call.meta["val"] = tuple(torch.empty_like(n.meta["val"]) for n in nodes[1:4])
    graph.output(call)
    return graph


def of(graph: fx.Graph) -> float:
    """MiB of the only call."""
    (call,) = (n for n in graph.nodes if n.op == "call_function")
    return workspace_bytes(call) / MIB


def test_a_gradient_and_a_sum_for_every_row_in_float32() -> None:
    """An H200 had 3,756.7 MiB where 3,498.7 were planned without these (docs/results/gpu)."""
    assert of(backward(H200, H200)) == 256 + 2


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ((1, 1, 1, 8), 4 * 128 * (32 + 1)),
        ((1, 1, 129, 40), 4 * 256 * (64 + 1)),
        ((1, 1, 128, 136), 4 * 128 * (192 + 1)),
    ],
)
def test_rows_and_columns_are_rounded_up(size: Sequence[int], nbytes: int) -> None:
    assert of(backward(size, size)) * MIB == nbytes


def test_heads_that_share_keys_and_values_have_their_gradients_first() -> None:
    assert of(backward(H200, (16, 8, 1024, 128))) == 256 + 2 + 2 * 128


def test_a_gradient_that_is_not_contiguous_is_copied() -> None:
    assert of(backward(H200, H200, copied=True)) == 256 + 2 + 128


def product(operator: OpOverload, a: Tensor, b: Tensor) -> fx.Graph:
    """A graph of one product."""
    graph = fx.Graph()
    nodes = [graph.placeholder("a"), graph.placeholder("b")]
    for node, made in zip(nodes, (a, b), strict=True):
        node.meta["val"] = made
    call = graph.call_function(operator, tuple(nodes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        call.meta["val"] = operator(a, b)
    graph.output(call)
    return graph


ONE = torch.ones(())


@pytest.mark.parametrize(
    ("operator", "a", "b", "copied"),
    [
        (aten.mm.default, torch.empty(512, 1024), torch.empty(1024, 256), 0),
        (aten.mm.default, torch.empty(1024, 512).t(), torch.empty(256, 1024).t(), 0),
        (aten.mm.default, ONE.expand(512, 1024), torch.empty(1024, 256), 2),
        (aten.mm.default, torch.empty(512, 1024), ONE.expand(1024, 256), 1),
        (aten.mm.default, ONE.expand(512, 1024), ONE.expand(1024, 256), 3),
        (aten.mm.default, torch.empty(512, 1).expand(512, 1024), torch.empty(1024, 256), 2),
        (aten.mm.default, torch.empty(512, 2048)[:, ::2], torch.empty(1024, 256), 2),
        (aten.mm.default, torch.empty(512, 2048)[:, :1024], torch.empty(1024, 256), 0),
        (aten.bmm.default, torch.empty(64, 8, 512).transpose(0, 1), torch.empty(8, 512, 64), 0),
        (aten.bmm.default, ONE.expand(8, 512, 256), torch.empty(8, 256, 64), 4),
    ],
)
def test_a_product_copies_what_no_library_takes(operator: OpOverload, a: Tensor, b: Tensor, copied: float) -> None:
    """The bytes are those that a counter of allocations saw beside the result."""
    assert of(product(operator, a, b)) == copied


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the CPU has no products of bfloat16")
@pytest.mark.parametrize(
    ("rows", "depth", "columns", "plain", "turned"),
    [
        (768, 768, 768, 147, 1123),
        (2304, 640, 384, 147, 739),
        (512, 3072, 768, 211, 1123),
        (8192, 64, 1000, 91, 123),
        (512, 8192, 512, 211, 867),
        (768, 2048, 3072, 211, 1379),
        (4096, 1536, 64, 211, 419),
        (16, 16, 16, 0, 0),
    ],
)
def test_a_product_of_bfloat16_packs_blocks(rows: int, depth: int, columns: int, plain: int, turned: int) -> None:
    """The bytes are what a counter saw on an EPYC with AVX-512 and one thread, in KiB: so many, and 19 of other things.
    `turned`: the first matrix is."""
    other = torch.empty(depth, columns, dtype=torch.bfloat16)
    for a, counted in (
        (torch.empty(rows, depth, dtype=torch.bfloat16), plain),
        (torch.empty(depth, rows, dtype=torch.bfloat16).t(), turned),
    ):
        found = of(product(aten.mm.default, a, other)) * 1024
        assert found == max(counted - 19, 0) * torch.get_num_threads()


def test_batches_of_bfloat16_are_copied_if_apart() -> None:
    heads = torch.empty(256, 16, 512, dtype=torch.bfloat16).transpose(0, 1)
    other = torch.empty(16, 512, 256, dtype=torch.bfloat16)
    apart, behind = (of(product(aten.bmm.default, each, other)) for each in (heads, heads.contiguous()))
    assert apart - behind == (4 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0)


Z, REAL = torch.empty(512, 1024, dtype=torch.complex64), torch.empty(512, 1024)


@pytest.mark.parametrize(
    ("function", "taken"),
    [
        (lambda z, x: z / z, 0),
        (lambda z, x: z / x, 4),
        (lambda z, x: z * x[:1, :1].expand(512, 1024), 4),
        (lambda z, x: z * (x > 0), 4),
        (lambda z, x: torch.where(x > 0, z, 0), 0),
        (lambda z, x: torch.where(x > 0, 1j, 2j), 0),
        (lambda z, x: z.conj() * z, 0),
        (lambda z, x: z.abs(), 4),
        (lambda z, x: torch.complex(x, x), 0),
    ],
)
def test_operators_on_complex_numbers_copy_real_ones(function: Callable[[Tensor, Tensor], Tensor], taken: int) -> None:
    """The MiB are those that a counter of allocations saw beside the result."""
    graph = make_fx(function, tracing_mode="fake")(Z, REAL).graph
    call = graph.output_node().all_input_nodes[0]
    assert workspace_bytes(call) == taken * MIB


def test_the_copy_is_there_when_the_addition_is_computed_that_the_product_becomes() -> None:
    """mm -> add: one call, at the addition."""

    def function(x: Tensor, y: Tensor, one: Tensor) -> Tensor:
        return x @ one.expand(256, 1024) + y

    graph = make_fx(function, tracing_mode="fake")(torch.empty(1024, 256), torch.empty(1024, 1024), ONE).graph
    nodes = list(graph.nodes)
    curve = buffers(Kernels(graph)).alive([], len(nodes))
    assert [n.name for n, nbytes in zip(nodes, curve, strict=True) if nbytes == MIB] == ["add"]


def test_it_is_alive_during_the_call_alone() -> None:
    graph = backward(H200, H200)
    found = buffers(Kernels(graph))
    call = next(i for i, n in enumerate(graph.nodes) if n.op == "call_function")
    curve = found.alive([], len(graph.nodes))
    assert [nbytes / MIB for nbytes in curve] == [258 if i == call else 0 for i in range(len(graph.nodes))]


def convolution(
    image: Tensor, weight: Tensor, step: int, mask: Sequence[bool] = (), *, groups: int = 1, transposed: bool = False
) -> fx.Graph:
    """A graph of one convolution, or of its gradients if there is a `mask`."""
    dims, kernel = image.ndim - 2, weight.shape[-1]
    padding = 0 if step == kernel else (kernel - 1) // 2 if transposed else kernel // 2
    rest = ([step] * dims, [padding] * dims, [1] * dims, transposed, [0] * dims, groups)
    graph = fx.Graph()
    with image.fake_mode if isinstance(image, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True):
        result = aten.convolution.default(image, weight, None, *rest)
        given = [graph.placeholder(name) for name in ("grad", "image", "weight")]
        for node, made in zip(given, (result, image, weight), strict=True):
            node.meta["val"] = made
        if mask:
            call = graph.call_function(aten.convolution_backward.default, (*given, None, *rest, list(mask)))
        else:
            call = graph.call_function(aten.convolution.default, (*given[1:], None, *rest))
        call.meta["val"] = result
    graph.output(call)
    return graph


@pytest.mark.parametrize(
    ("size", "weight", "step", "forward", "backward"),
    [
        ((4, 128, 32, 32), (128, 128, 3, 3), 1, 617, 1158),
        ((4, 64, 64, 64), (64, 64, 3, 3), 1, 185, 294),
        ((4, 64, 64, 64), (128, 64, 3, 3), 2, 329, 593),
        ((4, 128, 64, 64), (64, 128, 1, 1), 1, 0, 0),
        ((4, 100, 32, 32), (36, 100, 3, 3), 1, 210, 321),
        ((4, 64, 64, 64), (4, 64, 3, 3), 1, 77, 53),
        ((8, 3, 256, 256), (256, 3, 16, 16), 16, 809, 4695),
        ((8, 16, 32, 32), (64, 16, 16, 16), 16, 1065, 4311),
    ],
)
def test_a_convolution_packs_its_weight(
    size: Sequence[int], weight: Sequence[int], step: int, forward: int, backward: int
) -> None:
    """What a counter saw on an EPYC with AVX-512 and one thread, in KiB, `backward` of the weight's gradient: up to 100
    are of other things."""
    image, kernel = (torch.empty(*of).to(memory_format=torch.channels_last) for of in (size, weight))
    calls = (convolution(image, kernel, step), convolution(image, kernel, step, (False, True, False)))
    for call, counted in zip(calls, (forward, backward), strict=True):
        assert counted - 100 <= of(call) * 1024 <= counted
    first = convolution(image, kernel.contiguous(), step, (False, True, False))
    copied = 0 if weight[-1] == 1 else kernel.numel() * 4 / MIB
    assert of(first) - of(calls[1]) == copied


LAST = torch.channels_last


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("size", "weight", "step", "more", "taken"),
    [
        ((4, 64, 2048), (64, 64, 3), 1, {}, (2.000, 2.000, 4.000)),
        ((4, 64, 4095), (128, 64, 3), 2, {}, (4.093, 7.998, 7.999)),
        ((4, 64, 1024), (64, 64, 31), 1, {}, (1.000, 7.750, 9.688)),
        ((4, 64, 1024), (64, 32, 4), 2, {"transposed": True}, (2.000, 1.000, 2.000)),
        ((4, 128, 1024), (128, 1, 3), 1, {"groups": 128}, (2.000, 2.000, 4.000)),
        ((4, 128, 32, 32), (128, 1, 3, 3), 1, {"groups": 128}, (0.000, 2.000, 4.000)),
        ((4, 128, 63, 63), (128, 1, 3, 3), 2, {"groups": 128}, (0.000, 7.752, 9.752)),
        ((4, 128, 32, 32), (128, 64, 3, 3), 1, {"groups": 2}, (0.316, 0.316, 0.562)),
        ((4, 128, 32, 32), (128, 64, 4, 4), 2, {"transposed": True}, (1.098, 0.562, 1.000)),
        ((2, 64, 8, 16, 16), (64, 32, 2, 2, 2), 2, {"transposed": True}, (8.000, 4.062, 5.000)),
        ((2, 32, 16, 32, 32), (64, 32, 3, 3, 3), 1, {}, (8.000, 8.211, None)),
    ],
)
def test_convolutions_of_other_dimensions_and_of_groups_copy_images(
    size: Sequence[int],
    weight: Sequence[int],
    step: int,
    more: Mapping[str, Any],
    taken: Sequence[float | None],
    symbolic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MiB of the forward, the gradient of the image, and that of the weight: what our allocator counted with AVX2 and
    one thread. Images and weights have their channels last where their strides tell, as under Inductor. The gradient of
    a weight of three dimensions was a product of matrices there."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    image, kernel = torch.empty(size), torch.empty(weight)
    if len(size) == 4:
        image, kernel = image.to(memory_format=LAST), kernel if weight[1] == 1 else kernel.to(memory_format=LAST)
    if symbolic:
        mode, sizes = FakeTensorMode(shape_env=ShapeEnv()), [DimDynamic.DYNAMIC] * len(size)
        image = mode.from_tensor(image, symbolic_context=StatelessSymbolicContext(sizes))
        kernel = mode.from_tensor(kernel)
    for mask, counted in zip(((), (True, False, False), (False, True, False)), taken, strict=True):
        if counted is not None:
            assert of(convolution(image, kernel, step, mask, **more)) == pytest.approx(counted, rel=0.05, abs=0.1)


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_the_workspace_of_a_convolution_is_known_on_the_cpu_alone(device: str) -> None:
    with FakeTensorMode():
        image, weight = torch.empty(4, 64, 2048, device=device), torch.empty(64, 64, 3, device=device)
        assert of(convolution(image, weight, 1, (True, True, False))) == 0


def test_a_convolution_copies_an_image_with_gaps() -> None:
    """nearest -> cat: the gradient of a part of a cat."""
    whole, weight = torch.empty(4, 64, 64, 64), torch.empty(32, 64, 1, 1)
    graph = convolution(whole, weight, 1, (True, True, False))
    grad = next(iter(graph.nodes))
    grad.meta["val"] = whole[:, 32:]
    assert of(graph) == 2
