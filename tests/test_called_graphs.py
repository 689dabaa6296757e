"""Graphs that a graph calls (`torch.cond` has two). Inductor compiles them within the one around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ssd_fx

Loss = Callable[[Tensor, Tensor], Tensor]


def branch(x: Tensor, w: Tensor) -> Tensor:
    """The operand `y` is read again behind the branch, in the forward and in the backward."""
    y = (x @ w).sin()
    z = torch.cond(y.sum() > 0, lambda a, b: (a * b).exp(), lambda a, b: (a @ b).cos(), (y, w))
    return (z * y.exp()).sum()


def branch_in_a_branch(x: Tensor, w: Tensor) -> Tensor:
    def inner(a: Tensor, b: Tensor) -> Tensor:
        return torch.cond(a.sum() > 100, lambda a, b: a + b, lambda a, b: (a * b).exp(), (a, b))

    y = (x @ w).sin()
    z = torch.cond(y.sum() > -100, inner, lambda a, b: (a @ b).cos(), (y, w))
    return (z * y.exp()).sum()


class BranchInTheBackward(torch.autograd.Function):
    """Dynamo's graph calls `autograd_function_apply`, and only the graph of its backward calls `torch.cond`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        a = torch.cond(x.sum() > -1e9, lambda g, x: g * x.exp() * x, lambda g, x: g * x.cos(), (x, gradient))
        return a * w + x * gradient, gradient * x + w.cos() * x


def branch_in_the_backward(x: Tensor, w: Tensor) -> Tensor:
    y, v = (x @ w).sin(), w.exp()
    return (BranchInTheBackward.apply(y, v) * y * v).sum()


def gradients(loss: Loss) -> list[Tensor]:
    x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    w = torch.linspace(1, -2, 64).reshape(8, 8).requires_grad_()
    return list(torch.autograd.grad(loss(x, w), (x, w)))


@pytest.mark.parametrize("loss", [branch, branch_in_a_branch, branch_in_the_backward])
def test_no_branch_writes_over_an_operand_that_is_read_again(loss: Loss, tmp_path: Path) -> None:
    """Inductor takes the numbers of the backward's donated inputs for those of the branch's (torch 2.13). All our
    handles are donated, so ours was wrong where plain Inductor was right."""
    torch._dynamo.reset()
    options = {"dirs": [str(tmp_path)], "budget": 0, "min_bytes": 0, "recompute": False}
    ours = gradients(torch.compile(loss, backend=ssd_fx.backend, options=options))
    assert ssd_fx.stats().stores > 0
    for found, right in zip(ours, gradients(loss), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
