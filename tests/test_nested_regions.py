"""`torch.compiler.nested_compile_region`: a block that is compiled once and called several times within one graph.

PyTorch's metadata say of what two calls return that it is one tensor: who believes that saves one and reads it twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ssd_fx
from tests.bitwise import Compile, eager, ours, prove_bitwise, run, stock


@torch.compiler.nested_compile_region
def products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().cos()


@torch.compiler.nested_compile_region
def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w) * x.sigmoid()


Region = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def train(region: Region, compile: Compile) -> list[torch.Tensor]:
    """The loss and the gradient of two steps of three calls."""
    w, x = torch.nn.Parameter(torch.randn(64, 64) / 8), torch.randn(32, 64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = region(x, w)
        return x.square().sum()

    compiled, seen = compile(loss), []
    for _ in range(2):
        value = compiled(x)
        seen += [value.detach(), *torch.autograd.grad(value, [w])]
    return seen


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("region", [products, gated])
def test_gradients_are_bitwise_those_of_stock(region: Region, recompute: bool, tmp_path: Path) -> None:
    slow = {"flops": 1e12, "memory_bw": 1e11, "write_bw": 1e7, "read_bw": 1e7, "latency_s": 0.0}
    options = {"inner": "aot_eager", "dirs": [str(tmp_path)], "min_bytes": 0, "recompute": recompute, "machine": slow}
    with pytest.warns(RuntimeWarning, match="a nested region .* returns it"):
        prove_bitwise(partial(train, region), [stock("aot_eager"), ours(options)])
    assert ssd_fx.stats().offloaded_bytes >= 2 * 3 * 32 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize("region", [products, gated])
def test_inductor(region: Region, tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "recompute": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ssd_fx keeps about", RuntimeWarning)
        plain, found = (run(partial(train, region), compile) for compile in (stock("inductor"), ours(options)))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert ssd_fx.stats().offloaded_bytes >= 2 * 3 * 32 * 64 * 4


@torch.compiler.nested_compile_region
def cosine(x: torch.Tensor) -> torch.Tensor:
    return x.cos()


def test_a_region_of_dynamic_size(tmp_path: Path) -> None:
    """Inductor hands the size on as an argument that is no buffer."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return cosine(cosine(cosine(x)).sin()).sum()

    def gradient(compile: Compile) -> tuple[torch.Tensor, ...]:
        x = torch.randn(8, 16, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        return torch.autograd.grad(compile(loss)(x), [x])

    found = run(gradient, ours({"dirs": [str(tmp_path)], "min_bytes": 0}))
    assert ssd_fx.stats().offloaded_bytes > ssd_fx.stats().held_bytes
    torch.testing.assert_close(found, run(gradient, stock("aot_eager")))


@torch.compiler.nested_compile_region
def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh()


@torch.compiler.nested_compile_region
def joined(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((a + b) @ w).tanh()


def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A region's result, which it returns a second time to be saved, is the last operand of the sum."""
    x = x * 1.5
    for _ in range(3):
        x = x + layer(x, w)
    return x.square().sum()


def one_gradient_for_two(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The backward of `a + b` has one tensor for both."""
    a, b = x * 2, x.cos() * 3
    y = joined(a, b, w) + a
    return (joined(y * 0.5, b + 1, w) + y).square().sum()


@pytest.mark.parametrize(
    ("loss", "budget"),
    [
        (residual, 0),
        (one_gradient_for_two, 1.0),
        pytest.param(residual, 1.0, marks=pytest.mark.slow),
        pytest.param(one_gradient_for_two, 0, marks=pytest.mark.slow),
    ],
)
def test_no_kernel_writes_over_a_tensor_that_a_region_returns_twice(
    loss: Region, budget: float, tmp_path: Path
) -> None:
    """Plain Inductor does (torch 2.13), and its gradients are wrong. So ours are compared with eager's."""

    def gradients(compile: Compile) -> tuple[torch.Tensor, ...]:
        x, w = torch.randn(32, 32, requires_grad=True), (torch.randn(32, 32) / 6).requires_grad_()
        return torch.autograd.grad(compile(loss)(x, w), [x, w])

    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "budget": budget, "machine": "default"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ssd_fx keeps", RuntimeWarning)
        found = run(gradients, ours(options))
    assert (ssd_fx.stats().offloaded_bytes > ssd_fx.stats().held_bytes) == (budget == 0)
    torch.testing.assert_close(found, run(gradients, eager), rtol=1e-4, atol=1e-4)
