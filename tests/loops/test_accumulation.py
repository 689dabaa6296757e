"""Gradient accumulation: one micro-batch after the other, or many forwards before the first backward.

64 forwards with a backward each, in three orders: tests/test_lives.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import ssd_fx
from ssd_fx.runtime.entries import living
from tests.bitwise import Compile
from tests.loops.loops import (
    Loop,
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    gradients,
    parameters,
)

STEPS = 2


def in_flight(micro_batches: int, disk: list[int]) -> Loop:
    """All forwards, then one backward of the sum of their losses; `disk` gets the space of the files after a step."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(blocks=1)
        compiled = compile(model)
        seen = []
        for step in range(STEPS):
            stores = ssd_fx.stats().stores
            losses = [compiled(batch(step * micro_batches + i)) for i in range(micro_batches)]
            stored = ssd_fx.stats().stores - stores
            assert len(living()) == stored
            assert stored % micro_batches == 0
            backward(torch.stack(losses).sum())
            seen += [*(loss.detach() for loss in losses), *gradients(model)]
            del losses
            disk.append(ssd_fx.stats().disk_bytes)
        return seen

    return loop


@pytest.mark.parametrize(
    ("micro_batches", "inner"),
    [
        (16, "aot_eager"),
        pytest.param(64, "aot_eager", marks=pytest.mark.slow),
        pytest.param(64, "inductor", marks=pytest.mark.slow),
    ],
)
def test_in_flight(tmp_path: Path, micro_batches: int, inner: str) -> None:
    """Every backward gets the tensors of its own forward, and the next step takes no more of the disk."""
    disk: list[int] = []
    stats = assert_no_bit_changes(in_flight(micro_batches, disk), tmp_path, inner)
    assert_all_read_back(stats)
    assert stats.steps == STEPS
    assert sum(graph.steps for graph in stats.graphs.values()) == STEPS * micro_batches
    assert stats.stores % (STEPS * micro_batches) == 0
    assert disk[-1] == disk[-2]


@pytest.mark.parametrize("micro_batches", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_one_after_the_other(tmp_path: Path, micro_batches: int) -> None:
    """With the optimizer behind the last one; the disk holds one micro-batch at a time."""
    living_at_most = []

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(blocks=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compiled = compile(model)
        seen: list[Tensor] = []
        for step in range(STEPS):
            for i in range(micro_batches):
                loss = compiled(batch(step * micro_batches + i)) / micro_batches
                living_at_most.append(len(living()))
                backward(loss)
                seen.append(loss.detach())
                del loss
            seen += gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return seen + parameters(model)

    stats = assert_no_bit_changes(loop, tmp_path)
    assert_all_read_back(stats)
    assert living_at_most[-1] == stats.stores // (STEPS * micro_batches)
    assert max(living_at_most) == living_at_most[-1]
