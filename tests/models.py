"""What the end-to-end tests train: the example's GPT, small, on random bytes; and small modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from examples.train_gpt import GPT, Shape
from tests.bitwise import Compile

SMALL = Shape(layers=2, width=64, heads=2, seq=64, dropout=0.1)


def batch(shape: Shape = SMALL, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (inputs, targets), int64 [size, seq]."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 256, (size, shape.seq + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def gpt(steps: int = 5, shape: Shape = SMALL, device: str = "cpu") -> Callable[[Compile], list[torch.Tensor]]:
    """A program (`tests/bitwise.py`): loss and all gradients of every step of a fresh model."""

    def program(compile: Compile) -> list[torch.Tensor]:
        model = GPT(shape).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        compiled, seen = compile(model), []
        inputs, targets = (x.to(device) for x in batch(shape))
        for _ in range(steps):
            loss = compiled(inputs, targets)
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return program


class Residual(nn.Module):
    """x + down(tanh(up(norm(x))))"""

    def __init__(self, width: int = 64, times: int = 4, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class NamedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x).sigmoid()


class NamedBlock(nn.Module):
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.attn = NamedAttention()
        self.mlp = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.mlp(self.attn(x)).exp()


class Named(nn.Module):
    """Its modules have names for patterns, and one of each kind saves a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NamedBlock() for _ in range(2))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).cos().sum()
