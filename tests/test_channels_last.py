"""Images that Inductor lays out with their channels last: stored and loaded so, where nothing sees where bytes lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ssd_fx
from tests.bitwise import Compile, eager, kept, ours, prove_bitwise, run


class Block(nn.Module):
    """A convolution, a batch norm, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x + self.norm(self.conv(x))).relu()
        return out


class ResNet(nn.Module):
    """The first convolution reads an input, which has its channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv2d(3, 16, 3, 2, 1), nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first(x)).mean((2, 3))).square().sum()


class UNet(nn.Module):
    """Group norms view images as groups, and a `cat` joins what is far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down, self.within = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.last = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x)))
        z = F.silu(self.within(F.silu(self.down(y))))
        return self.last(F.silu(self.up(torch.cat((y, F.interpolate(z, scale_factor=2.0)), 1)))).square().sum()


class ViT(nn.Module):
    """Patches are a view of what a convolution returns, and products read that."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(torch.softmax(y @ self.layer(y).transpose(1, 2), -1) @ y).sin().sum()


class Seen(nn.Module):
    """`see` gets an image that two convolutions read, and what it returns of it is saved."""

    def __init__(self, see: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.see = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), see

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).sigmoid()
        return self.two(y).square().sum() + (self.see(y).exp() * 0.1).sum()


def by_place(y: Tensor) -> Tensor:
    """Elements by their places in the storage."""
    return y.as_strided((4, 4), (64, 3), 5)


def flat(y: Tensor) -> Tensor:
    """A view that no image with its channels last allows."""
    return y.view(len(y), -1)[:, 3:50].tanh()


def bits(y: Tensor) -> Tensor:
    """The lowest bits differ from eager mode's, where a convolution adds up in another order."""
    return y * (y.detach().view(torch.int32) >> 20 & 1)


def turned(y: Tensor) -> Tensor:
    return y.permute(3, 0, 2, 1).contiguous().sin()


def expanded(y: Tensor) -> Tensor:
    return y[:, :1].expand(-1, 8, -1, -1).sin()


def halves(y: Tensor) -> Tensor:
    one, other = y.chunk(2, 1)
    return one.cos() * other


SEEN = (by_place, flat, bits, turned, expanded, halves)


def trained(make: Callable[[], nn.Module], size: tuple[int, ...] = (2, 3, 16, 16)) -> Callable[[Compile], list[Tensor]]:
    """Two steps of a model on images, which get gradients too."""

    def program(compile: Compile) -> list[Tensor]:
        model, x = make(), torch.randn(size, requires_grad=True)
        call, losses = compile(model), []
        for _ in range(2):
            loss = call(x * 1.0)
            loss.backward()
            losses.append(loss.detach())
        return [*losses, x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    return program


def options(directory: Path) -> dict[str, Any]:
    return {
        "budget": 0,
        "dirs": [str(directory)],
        "machine": "default",
        "min_bytes": 0,
        "recompute": False,
        "spare": False,
    }


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet": ResNet, "unet": UNet, "vit": ViT}
MODELS |= {see.__name__: partial(Seen, see) for see in SEEN}


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes_and_it_is_what_eager_computes(name: str, tmp_path: Path) -> None:
    program = trained(MODELS[name])
    found = prove_bitwise(program, [kept(options(tmp_path)), ours(options(tmp_path))])
    assert ssd_fx.stats().stores > 0
    expected = run(program, eager)
    nothing = 1e-5 * float(max(value.abs().max() for value in expected))  # a softmax makes the gradient of a bias zero
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-3, atol=nothing)
