"""Parameters that do not train: nothing is saved, and nothing written, for their gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from tests.bitwise import Compile
from tests.loops.loops import (
    ACTIVATION_BYTES,
    WIDTH,
    Loop,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    gradients,
    parameters,
)
from tests.unlike import before


def trained(make: Callable[[], nn.Module]) -> Loop:
    """Three steps of AdamW on what trains; gradients of every step, all parameters at the end."""

    def loop(compile: Compile) -> list[Tensor]:
        model = make()
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        compiled = compile(model)
        seen = []
        for step in range(3):
            loss = compiled(batch(step))
            backward(loss)
            seen += [loss.detach(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return seen + parameters(model)

    return loop


class Chain(nn.Module):
    """linear -> tanh, `layers` times, of which the first `frozen` do not train."""

    def __init__(self, layers: int, frozen: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_frozen_layers(tmp_path: Path, frozen: int) -> None:
    """Every layer that trains saves its input and what tanh put out, which is the next one's input."""
    stats = assert_no_bit_changes(trained(lambda: Chain(layers=4, frozen=frozen)), tmp_path)
    assert_all_read_back(stats)
    trains = 4 - frozen
    assert stats.saved_bytes == 3 * (trains + 1) * ACTIVATION_BYTES


@before((2, 13), "a layer that is frozen after the model was compiled is saved for as before")
def test_layers_that_are_frozen_later(tmp_path: Path) -> None:
    """torch compiles again when a parameter stops to train; from then on less is saved."""
    saved: list[int] = []

    def loop(compile: Compile) -> list[Tensor]:
        model = Chain(layers=4, frozen=0)
        compiled = compile(model)
        seen, saved[:] = [], []
        for frozen in (0, 2, 0):
            model.requires_grad_(True)
            model.layers[:frozen].requires_grad_(False)
            before = ssd_fx.stats().saved_bytes
            backward(compiled(batch(frozen)))
            saved.append(ssd_fx.stats().saved_bytes - before)
            seen += gradients(model)
            model.zero_grad()
        return seen

    assert_all_read_back(assert_no_bit_changes(loop, tmp_path))
    assert saved == [5 * ACTIVATION_BYTES, 3 * ACTIVATION_BYTES, 5 * ACTIVATION_BYTES]


class LowRank(nn.Module):
    """LoRA: a frozen linear layer and a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + self.b(self.a(x))


class Block(nn.Module):
    """A mixer that is adapted, and behind it a wide pair of linear layers that is not."""

    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.mix: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if adapted:
            self.requires_grad_(False)
            self.mix = LowRank(self.mix)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x)
        return x + self.down(self.up(h) * 2)


class Blocks(nn.Module):
    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(adapted) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lora(tmp_path: Path, inner: str) -> None:
    """What the frozen weights' gradients would need, among it all that is wide, is not saved."""
    full = assert_no_bit_changes(trained(lambda: Blocks(adapted=False)), tmp_path, inner)
    adapted = assert_no_bit_changes(trained(lambda: Blocks(adapted=True)), tmp_path, inner)
    assert_all_read_back(adapted)
    assert full.saved_bytes - adapted.saved_bytes >= 3 * 2 * 4 * ACTIVATION_BYTES  # steps, blocks, width
