"""Parts of a storage that are packed for the drive: a backward that reads them gets the same bits, or is not broken.

The kernels behind a packed part loop over other strides than without ssd_fx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ssd_fx
from tests import sources
from tests.bitwise import Compile, ours, prove_bitwise, stock

OPTIONS = sources.OPTIONS | {"inner": "aot_eager"}
COMPLEX = {"dtype": torch.complex64}


def complex_products(x: Tensor, w: Tensor, p: Tensor, r: Tensor) -> Tensor:
    """Kernels round them otherwise where elements lie next to each other."""
    part = (x @ w)[:, 16:19]
    return (torch.view_as_real(part.conj() * p) * r).sum()


class Scaled(torch.autograd.Function):
    """The backward adds a multiple of a saved part, which kernels of bfloat16 round in two ways."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(part)
        return p.sin() * 2 + part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (part,) = ctx.saved_tensors
        return grad, torch.add(grad, part, alpha=0.3)


def scaled_sum(x: Tensor, w: Tensor, p: Tensor, r: Tensor) -> Tensor:
    return (Scaled.apply((x @ w)[:, 16:24], p) * r).sum()


def other_strides_than_promised(x: Tensor, w: Tensor) -> Tensor:
    """The kernel of a batch norm returns a contiguous tensor here, and its FakeTensor a permuted one."""
    h = F.batch_norm(x.permute(2, 1, 0), None, None, training=True)
    return (h[:, :, :2] * w).sum()


class Reinterpreted(torch.autograd.Function):
    """The backward views a saved part as elements of twice the size, which odd strides do not allow."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, q: Tensor, v: Tensor, u: Tensor) -> Tensor:
        a, b = y[:, 16:18], y[:, 18:21]
        ctx.save_for_backward(a, b, q, v, u)
        return a @ v * q + b * q

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, _, _, u = ctx.saved_tensors
        h = torch.where(a.view(torch.int64) > 0, grad, grad * 2)
        return (h * b) @ u, grad * b, a.t() @ grad, None


class ReinterpretedInHalves(torch.autograd.Function):
    """The backward views halves of a saved range as elements of twice the size. They begin at odd places of the range
    that is stored, and `chunk` stands between."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, q: Tensor) -> Tensor:
        a, b = y.flatten()[17:20], y.flatten()[18:22]
        ctx.save_for_backward(a, b, q)
        return (a * q[:3]).sum() + b * q

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, _ = ctx.saved_tensors
        positive = torch.cat([half.view(torch.int64) > 0 for half in b.chunk(2)]).repeat(2)
        return None, torch.where(positive, grad, grad * 2) * b + F.pad(a * grad[:3], (0, 1))


def reinterpreted(x: Tensor, w: Tensor, q: Tensor, v: Tensor, u: Tensor) -> Tensor:
    return Reinterpreted.apply(x @ w, q, v, u).sum()  # type: ignore[no-any-return]


def reinterpreted_in_halves(x: Tensor, w: Tensor, q: Tensor) -> Tensor:
    return ReinterpretedInHalves.apply(x @ w, q).sum()  # type: ignore[no-any-return]


def leaves(*sizes: tuple[int, ...], **more: Any) -> list[Tensor]:
    return [torch.randn(size, requires_grad=True, **more) for size in sizes]


BF16 = {"dtype": torch.bfloat16}
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "complex products": (
        complex_products,
        lambda: [*leaves((64, 8), (8, 64), (64, 3), **COMPLEX), torch.randn(64, 3, 2)],
    ),
    "a sum with a factor": (
        scaled_sum,
        lambda: [*leaves((64, 8), (8, 64), (64, 8), **BF16), torch.randn(64, 8, **BF16)],
    ),
    "other strides": (other_strides_than_promised, lambda: leaves((4, 6, 8), (8, 6, 2))),
    "elements of twice the size": (
        reinterpreted,
        lambda: [*leaves((8, 8), (8, 64), (8, 3), (2, 3)), torch.randn(3, 64)],
    ),
    "elements of twice the size, in halves": (
        reinterpreted_in_halves,
        lambda: [torch.randn(8, 8), torch.randn(8, 64), *leaves((4,))],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_that_is_packed_changes_no_bit(case: str) -> None:
    function, make = CASES[case]

    def gradients(compile: Compile) -> list[Tensor]:
        arguments = make()
        compile(function)(*arguments).backward()
        return [a.grad for a in arguments if a.grad is not None]

    prove_bitwise(gradients, [stock("aot_eager"), ours(OPTIONS)])
    assert ssd_fx.stats().offloaded_bytes
