"""Optimizers are not touched: after three steps their parameters and their state are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bitwise import Compile
from tests.loops.loops import (
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    parameters,
)

STEPS = 3


def state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that it keeps for its parameters, whatever they are called."""
    slots = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [value.clone() for slot in slots for value in slot.values() if isinstance(value, Tensor)]


def galore(given: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Gradients of matrices are projected to rank 4 by an SVD of their own, every other step."""
    library = pytest.importorskip("galore_torch", reason="needs pip install galore-torch")
    matrices, others = [], []
    for parameter in given:
        (matrices if parameter.dim() == 2 else others).append(parameter)
    projected = {"params": matrices, "rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    made: torch.optim.Optimizer = library.GaLoreAdamW([{"params": others}, projected], lr=1e-2)
    return made


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "GaLore": galore,
}


DEFAULT = ("AdamW", "AdamW fused", "GaLore")  # of the others the slow tests


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS])
def test_three_steps(tmp_path: Path, name: str) -> None:
    """With the norm of the gradients clipped, and gradients that are zeroed in place."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(blocks=1)
        optimizer = OPTIMIZERS[name](model.parameters())
        compiled = compile(model)
        seen = []
        for step in range(STEPS):
            backward(compiled(batch(step)))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seen += [norm, *parameters(model)]
        return [*seen, *state(optimizer)]

    stats = assert_no_bit_changes(loop, tmp_path)
    assert_all_read_back(stats)
    assert stats.steps == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_three_steps_under_inductor(tmp_path: Path, name: str) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        model = Net(blocks=1)
        optimizer = OPTIMIZERS[name](model.parameters())
        compiled = compile(model)
        for step in range(STEPS):
            backward(compiled(batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        return [*parameters(model), *state(optimizer)]

    assert_all_read_back(assert_no_bit_changes(loop, tmp_path, "inductor"))


def test_steps_within_the_backward(tmp_path: Path) -> None:
    """An optimizer per parameter that steps as soon as its gradient is there, and drops it: blocks compiled one by one,
    so that the first ones' parameters change while the others' tensors are still on disk."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net()
        steps: list[Any] = []
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=1e-2)

            def step(p: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()
                steps.append(p)

            parameter.register_post_accumulate_grad_hook(step)
        for i in range(len(model.blocks)):
            model.blocks[i] = compile(model.blocks[i])
        for i in range(STEPS):
            backward(model(batch(i)))
        assert len(steps) == STEPS * len(list(model.parameters()))
        return parameters(model)

    stats = assert_no_bit_changes(loop, tmp_path)
    assert stats.read_bytes == stats.written_bytes
