"""Several compiled models in one process: they share the runtime, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from tests.bitwise import Compile, assert_same_bits
from tests.loops.loops import (
    WIDTH,
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    gradients,
    parameters,
)
from tests.runtime.harness import directories


def generator_and_critic(compile: Compile) -> list[Tensor]:
    """A GAN: two models, two optimizers; the critic runs twice before a backward, once on what is detached."""
    generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (generator, critic)]
    make, judge = compile(generator), compile(critic)
    for step in range(3):
        fake = make(batch(step))
        backward(judge(fake.detach()).mean() - judge(batch(100 + step)).mean())
        optimizers[1].step()
        critic.zero_grad()
        backward(-judge(fake).mean())
        optimizers[0].step()
        generator.zero_grad()
        critic.zero_grad()
    return [*parameters(generator), *parameters(critic)]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_generator_and_critic(tmp_path: Path, inner: str) -> None:
    stats = assert_no_bit_changes(generator_and_critic, tmp_path, inner)
    assert stats.read_bytes == stats.written_bytes
    assert len(stats.graphs) >= 2


def test_a_teacher_that_does_not_train(tmp_path: Path) -> None:
    """Under `no_grad` it stores nothing, in the middle of a student's step."""

    def loop(compile: Compile) -> list[Tensor]:
        student, teacher = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)) for _ in range(2))
        study, teach = compile(student), compile(teacher)
        for step in range(2):
            answer = study(batch(step))
            before = ssd_fx.stats().stores
            with torch.no_grad():
                target = teach(batch(step))
            assert ssd_fx.stats().stores == before
            backward((answer - target).square().mean())
        return gradients(student)

    stats = assert_no_bit_changes(loop, tmp_path)
    assert_all_read_back(stats)
    assert len(stats.graphs) == 1


def test_each_has_its_own_options(tmp_path: Path) -> None:
    """One model on disk in one directory, one in another, one kept, one under stock: all in one step."""
    torch.manual_seed(0)
    models = [Net(blocks=1) for _ in range(4)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    common: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 0}
    said: list[dict[str, Any]] = [{"budget": 1.0}]
    said += [{"dirs": [path]} for path in directories(tmp_path, 2)]
    chosen: list[Any] = [{"backend": "ssd_fx", "options": common | more} for more in said]
    compiled = [torch.compile(m, **how) for m, how in zip(models, [*chosen, {"backend": "aot_eager"}], strict=True)]
    losses = []
    for model in compiled:
        torch.manual_seed(1)
        losses.append(model(batch(0)))
    stats = ssd_fx.stats()
    backward(torch.stack(losses).sum())
    assert ssd_fx.stats().loads == stats.stores
    expected = gradients(models[-1])
    for model in models[:-1]:
        for ours, theirs in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert_same_bits(gradients(models[1]) + gradients(models[2]), 2 * gradients(models[0]))
    kept, moved = sorted(stats.graphs.values(), key=lambda graph: graph.steps)  # two differ in their directory alone
    assert (kept.steps, kept.stores, moved.steps, moved.stores % 2) == (1, 0, 2, 0)
    assert 0.9 * moved.saved_bytes <= moved.offloaded_bytes <= moved.saved_bytes == 2 * kept.saved_bytes


def test_evaluation_between_steps(tmp_path: Path) -> None:
    """The same model in evaluation mode is a graph of its own, which stores nothing."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net()
        compiled = compile(model)
        seen = []
        for step in range(3):
            model.train()
            backward(compiled(batch(step)))
            model.eval()
            before = ssd_fx.stats().stores
            with torch.inference_mode():
                seen.append(compiled(batch(step)).clone())
            assert ssd_fx.stats().stores == before
        return seen + gradients(model)

    assert_all_read_back(assert_no_bit_changes(loop, tmp_path))
