"""Mixed precision: autocast to bfloat16 and float16, and the scaler that float16 needs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ssd_fx
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
    run,
)

STEPS, OVERFLOWS_AT = 4, 2
SCALE = 2.0**10  # small enough that only the step that is meant to does overflow


def mixed(dtype: torch.dtype, *, inside: bool = False) -> Loop:
    """Autocast around the call, or `inside` of what is compiled; losses, gradients and parameters of every step."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == torch.float16)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype):
                loss: Tensor = model(x)
            return loss

        compiled = compile(forward if inside else model)
        seen = []
        for step in range(STEPS):
            with torch.autocast("cpu", dtype, enabled=not inside):
                loss = compiled(batch(step))
            backward(scaler.scale(loss))
            seen += [loss.detach(), *gradients(model)]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += parameters(model)
        return seen

    return loop


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(tmp_path: Path, dtype: torch.dtype, inside: bool) -> None:
    stats = assert_no_bit_changes(mixed(dtype, inside=inside), tmp_path)
    assert_all_read_back(stats)
    assert stats.steps == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_under_inductor(tmp_path: Path, dtype: torch.dtype) -> None:
    assert_all_read_back(assert_no_bit_changes(mixed(dtype), tmp_path, "inductor"))


def test_half_precision_goes_to_disk_as_it_is(tmp_path: Path) -> None:
    """What a matrix product saves is half as large: nothing is widened on its way."""

    def saved_bytes(dtype: torch.dtype) -> int:
        def loop(compile: Compile) -> list[Tensor]:
            compiled = compile(lambda x, w: (x @ w).tanh().sum())
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = compiled(batch(0).requires_grad_(), batch(1, size=32).requires_grad_())
            backward(loss)
            return []

        run(loop, tmp_path)
        graph = ssd_fx.stats()
        assert graph.written_bytes + graph.held_bytes == graph.offloaded_bytes == graph.saved_bytes
        return graph.saved_bytes

    assert saved_bytes(torch.float32) == 2 * saved_bytes(torch.bfloat16)


def test_a_step_that_overflows_is_skipped(tmp_path: Path) -> None:
    """An infinity is loaded as an infinity: the scaler sees it, leaves the parameters alone and halves the scale."""
    scales: list[float] = []

    def loop(compile: Compile) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        compiled = compile(model)
        seen, scales[:] = [parameters(model)], []
        for step in range(STEPS):
            inputs = batch(step) * (torch.inf if step == OVERFLOWS_AT else 1.0)
            with torch.autocast("cpu", torch.float16):
                loss = compiled(inputs)
            backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            seen.append(parameters(model))
        changed = [any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in pairwise(seen)]
        assert changed == [step != OVERFLOWS_AT for step in range(STEPS)]
        return [p for step in seen for p in step]

    assert_all_read_back(assert_no_bit_changes(loop, tmp_path))
    assert scales == [SCALE if step < OVERFLOWS_AT else SCALE / 2 for step in range(STEPS)]
