"""What is trained as CUDA code: each case is a model and its inputs, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.train_gpt import GPT, Shape
from tests.passes import toys
from tests.passes.recomputing import SLOW

Case = tuple[nn.Module, tuple[Tensor, ...]]


class _Toy(nn.Module):
    def __init__(self, function: toys.Toy, weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def toy(function: toys.Toy) -> Case:
    x, w = toys.inputs()
    return _Toy(function, w), (x,)


class SavedMask(nn.Module):
    """linear -> > 0 -> where: of the first product only a mask of bools is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.asked(x) > 0, self.answer(x), x).tanh()


class Dropping(nn.Module):
    """linear -> dropout -> sum with the input -> norm -> dropout: the norm's kernel draws, and one of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + F.dropout(self.linear(x), 0.5))
        return F.dropout(x.sin(), 0.5)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(self.norm(F.gelu(self.wide(x)))).square()
        return out


def gpt(dropout: float) -> Case:
    shape = Shape(layers=2, width=32, heads=2, seq=16, dropout=dropout)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    return GPT(shape), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def conv_net() -> Case:
    def stage(of: int, to: int) -> list[nn.Module]:
        return [nn.Conv2d(of, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    return nn.Sequential(*stage(3, 4), *stage(4, 8), *head), (torch.randn(2, 3, 8, 8),)


TOYS = (
    *(toys.shared_view, toys.in_place, toys.tied_weight, toys.non_contiguous, toys.views_only, toys.multi_output),
    *(toys.dropout, toys.slice_of_big_base, toys.written_between, toys.expanded, toys.saved_twice),
    *(toys.half_precision, toys.complex_numbers, toys.lazy_negative),
)
CASES: dict[str, Callable[[], Case]] = {
    "MLP": lambda: (Mlp(), (torch.randn(16, 32, requires_grad=True),)),
    "saved mask": lambda: (SavedMask(), (torch.randn(16, 32),)),
    **{function.__name__: partial(toy, function) for function in TOYS},
    "conv net": conv_net,
    "GPT": partial(gpt, 0.0),
    "GPT with dropout": partial(gpt, 0.1),
    "drawn again": lambda: (Dropping(), (torch.randn(64, 64),)),
}
# Of ssd_fx, beside those that offload all: plans that keep, recompute and block; and that draw masks again.
OPTIONS: dict[str, dict[str, Any]] = {
    "GPT with dropout": {"budget": 0.3, "recompute": True},
    "drawn again": {"recompute": True, "machine": SLOW | {"to_host_bw": 2e7, "from_host_bw": 2e7}},
}
RANDOM = ("dropout", "GPT with dropout", "drawn again")  # a GPU's random numbers are others than the CPU's
AGAIN = ("drawn again",)  # kernels draw one by one here; transfers are too slow for anything to be read
