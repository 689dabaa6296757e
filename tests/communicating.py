"""A user's operator that could be a collective: how often it runs, and in which order, is seen from outside."""

from __future__ import annotations

import torch
from torch import Tensor

calls: list[str] = []


@torch.library.custom_op("ssd_fx_tests::exchange", mutates_args=())
def exchange(x: Tensor, name: str) -> Tensor:
    """Twice `x`; the other ranks would have to call it as often, and in the same order."""
    calls.append(name)
    return x * 2


@exchange.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
    return grad * 2, None


exchange.register_autograd(_backward)
