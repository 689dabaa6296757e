"""What a backward does beside computing dense gradients: it writes into an input, it yields a sparse tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from tests.bitwise import assert_same_bits


@torch.library.custom_op("ssd_fx_tests::tallied_sin", mutates_args=())
def tallied_sin(x: Tensor, tally: Tensor) -> Tensor:
    return x.sin()


@tallied_sin.register_fake
def _(x: Tensor, tally: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
    x, tally = ctx.saved_tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        tally.add_(grad.square())
    return grad * x.cos(), None


tallied_sin.register_autograd(_backward, setup_context=_setup)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_backward_writes_an_input(inner: str, tmp_path: Path) -> None:
    """x -> tallied_sin -> mul: the backward adds to `tally`, an input that it is given as a saved tensor."""

    def step(x: Tensor, tally: Tensor) -> Tensor:
        return tallied_sin(x.exp(), tally) * 3

    def train(function: object) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 1024).requires_grad_()
        tally = torch.ones(1024)
        for _ in range(2):
            function(x.clone(), tally).sum().backward()  # type: ignore[operator]
        assert x.grad is not None
        return x.grad, tally

    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "budget": 0, "inner": inner}
    expected, expected_tally = train(step)
    gradient, tally = train(torch.compile(step, backend=ssd_fx.backend, options=options))
    assert torch.equal(tally, expected_tally)
    torch.testing.assert_close(gradient, expected)
    assert ssd_fx.stats().loads == ssd_fx.stats().stores == 2  # exp alone, or x, in both steps


@pytest.mark.parametrize(("bag", "groups"), [(False, 4), (True, 5)])  # two of what a bag returns stay
def test_sparse_gradient(bag: bool, groups: int, tmp_path: Path) -> None:
    """embedding -> mm -> sin: the weight's gradient has no storage."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(64, 16, mode="sum", sparse=True) if bag else nn.Embedding(64, 16, sparse=True)
    rows, weight = torch.randint(64, (32, 4)), torch.randn(16, 16, requires_grad=True)

    def step() -> Tensor:
        return (table(rows) @ weight).sin().sum()

    def gradients(function: object) -> tuple[Tensor, Tensor]:
        table.weight.grad = weight.grad = None
        function().backward()  # type: ignore[operator]
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        assert weight.grad is not None
        return table.weight.grad.to_dense(), weight.grad

    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "budget": 0, "inner": "aot_eager"}
    expected = gradients(step)
    assert_same_bits(gradients(torch.compile(step, backend=ssd_fx.backend, options=options)), expected)
    assert ssd_fx.stats().loads == ssd_fx.stats().stores == groups
