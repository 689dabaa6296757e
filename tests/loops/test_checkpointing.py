"""Activation checkpointing: around compiled modules, within them, and selective. What is still saved goes to disk.

Dropout under a checkpoint: tests/test_models.py. Policies that ask for offloading: tests/test_marks.py. PyTorch's own
memory budget: tests/test_recompute.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ssd_fx
from tests.loops.loops import (
    ACTIVATION_BYTES,
    WIDTH,
    Compile,
    Loop,
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    gradients,
    run,
)

Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def through(region: Region, *, compile_blocks: bool) -> Loop:
    """Every block of a net is called through `region`; the blocks are compiled, or all of it is."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(dropout=0.0)  # the state of the generator, 5 KB that stay, would be most of what a checkpoint saves
        blocks = [compile(block) for block in model.blocks] if compile_blocks else list(model.blocks)

        def forward(x: Tensor) -> Tensor:
            for block in blocks:
                x = x + region(block, x)
            return x.square().mean()

        step = forward if compile_blocks else compile(forward)
        seen = []
        for i in range(2):
            x = batch(i).requires_grad_()
            loss = step(x)
            backward(loss)
            assert x.grad is not None
            seen += [loss.detach(), x.grad]
        return seen + gradients(model)

    return loop


def plain(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(x)


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def reentrant(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("region", [checkpointed, reentrant])
def test_around_compiled_blocks(tmp_path: Path, region: Region) -> None:
    """The forward that runs again in the backward stores for it once more; nothing of the first run stays."""
    stats = assert_no_bit_changes(through(region, compile_blocks=True), tmp_path)
    assert stats.read_bytes + stats.forwarded_bytes + stats.held_bytes >= stats.offloaded_bytes // 2


def test_within_a_compiled_model(tmp_path: Path) -> None:
    """Less is saved, as it is without us, and that little still goes to disk."""
    everything = assert_no_bit_changes(through(plain, compile_blocks=False), tmp_path)
    assert_all_read_back(everything)
    little = assert_no_bit_changes(through(checkpointed, compile_blocks=False), tmp_path)
    assert_all_read_back(little)
    assert little.saved_bytes < 0.5 * everything.saved_bytes


@pytest.mark.slow
@pytest.mark.parametrize("compile_blocks", [True, False])
def test_under_inductor(tmp_path: Path, compile_blocks: bool) -> None:
    assert_no_bit_changes(through(checkpointed, compile_blocks=compile_blocks), tmp_path, "inductor")


class Chain(nn.Module):
    """linear -> tanh -> sin, three times, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sin()
        return x


@pytest.mark.parametrize("saved", [0, 3])
def test_selective(tmp_path: Path, saved: int) -> None:
    """SAC that saves the matrix products, or nothing: those and the input of the region leave, and nothing else."""
    operators: list[Any] = [torch.ops.aten.mm.default] if saved else []
    context = functools.partial(create_selective_checkpoint_contexts, operators)

    def loop(compile: Compile) -> list[Tensor]:
        chain = Chain()

        def forward(x: Tensor) -> Tensor:
            out: Tensor = checkpoint(chain, x.cos(), use_reentrant=False, context_fn=context)
            return out.sum()

        loss = compile(forward)(batch(0).requires_grad_())
        backward(loss)
        return [loss.detach(), *gradients(chain)]

    stats = assert_no_bit_changes(loop, tmp_path)
    assert_all_read_back(stats)
    run(loop, tmp_path)
    inputs = 2  # x, and its cosine, which the region gets
    assert ssd_fx.stats().saved_bytes == (saved + inputs) * ACTIVATION_BYTES
