"""Small models, each with something that a saved tensor can trip over: bitwise what they are with everything kept.

Mixed precision, graphs that break: tests/loops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ssd_fx
from tests.bitwise import Compile, kept, ours, prove_bitwise
from tests.planned_order import assert_in_planned_order


class Concatenated(nn.Module):
    """Saved tensors are also the halves of a cat, which Inductor would like to build in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.a(x).sin(), self.b(x).exp()
        return (self.c(torch.cat([p, q], 1)).relu() * p * q).sum()


class Convolutional(nn.Module):
    """BatchNorm changes buffers, ReLU works in place, pooling saves indices."""

    def __init__(self) -> None:
        super().__init__()
        first = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.SiLU(inplace=True), nn.Flatten(), nn.Linear(128, 4))

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 1, 8, 4).repeat(1, 1, 2, 4)[:, :, :, :14].contiguous()
        return self.layers(images[:, :, :14]).square().sum()


class ChannelsLast(Convolutional):
    """The same with another order of strides."""

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 1, 8, 4).repeat(1, 1, 2, 4)[:, :, :14, :14]
        return self.layers(images.to(memory_format=torch.channels_last)).square().sum()


class Checkpointed(nn.Module):
    """Dropout under activation checkpointing saves the state of the generator, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: F.dropout(F.gelu(layer(y)), 0.1), x, use_reentrant=False)
        return self.layers[0](x).sigmoid().sum()


class ManyViews(nn.Module):
    """Chunks, transposes, slices and an expanded tensor of few storages."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        u, v = h.chunk(2, 1)
        t = torch.sigmoid(u) * v
        k = F.softmax(t.t() @ t, -1)
        slices = t[:5, :7].contiguous().exp().sum() + h.view(-1, 16)[::2].tanh().sum()
        return (k @ t.t()).sum() + slices + (u.unsqueeze(0).expand(3, -1, -1) @ k).sum()


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        y = x.exp()
        ctx.save_for_backward(y, x)
        return y

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        y, x = ctx.saved_tensors
        return grad * y + x * 0.1


class CustomFunction(nn.Module):
    """What is saved is chosen by hand, an input among it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return (_Exp.apply(self.a(x)) * self.a(x.sin())).sum()


MODELS = (Concatenated, Convolutional, ChannelsLast, Checkpointed, ManyViews, CustomFunction)


def gradients(make: Callable[[], nn.Module], micro_batches: int, compile: Compile) -> list[Tensor]:
    """Gradients and buffers after one step of `micro_batches` forwards before the first backward."""
    model = make()
    compiled = compile(model)
    x = torch.randn(16, 32, requires_grad=True)
    losses = [compiled(x * (i + 1)) for i in range(micro_batches)]
    for loss in losses:
        loss.backward()
    parameters = [p.grad for p in model.parameters() if p.grad is not None]
    assert x.grad is not None
    return [x.grad, *parameters, *model.buffers()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("make", MODELS)
def test_aot_eager(make: Callable[[], nn.Module], micro_batches: int, tmp_path: Path) -> None:
    options = {"inner": "aot_eager", "dirs": [str(tmp_path)], "min_bytes": 0}
    prove_bitwise(partial(gradients, make, micro_batches), [kept(options), ours(options)])
    assert ssd_fx.stats().stores > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_inductor(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path)], "min_bytes": 0}
    prove_bitwise(partial(gradients, make, 2), [kept(options), ours(options)])
    assert ssd_fx.stats().stores > 0
    assert_in_planned_order()
