"""A process's worth of steps for the tests of the report: models that train, in a second each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ssd_fx
from ssd_fx.report.report import Report

TOY: dict[str, Any] = {
    "inner": "aot_eager",
    "engine": "memory",
    "machine": "default",
    "min_bytes": 0,
    "recompute": False,
}
SIZE = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sigmoid())


class Stack(nn.Module):
    """Returns every hidden state, which the caller may keep."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = []
        for block in self.blocks:
            x = block(x).tanh()
            hidden.append(x)
        return hidden


def train(layers: int = 3, steps: int = 4, *, keep: bool = False, **options: Any) -> Stack:
    """Train a stack. keep: the caller keeps all hidden states until the backward is over."""
    torch._dynamo.reset()
    ssd_fx.reset_stats()
    model = Stack(layers)
    model.compile(backend=ssd_fx.backend, options=TOY | options)
    for _ in range(steps):
        hidden = model(torch.randn(SIZE, SIZE))
        loss = hidden[-1].sum()
        if not keep:
            hidden.clear()
        loss.backward()
    return model


def report(layers: int = 3, steps: int = 4, *, keep: bool = False, **options: Any) -> Report:
    """The report of a stack that has trained."""
    model = train(layers, steps, keep=keep, **options)
    found = ssd_fx.report()
    del model
    return found
