"""One model trained for three steps: a program of `tests/bitwise.py`, and what a run of it saved and moved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import ssd_fx
from tests.bitwise import Compile, close, run
from tests.faults.toys import settle
from tests.zoo.models import Builder

STEPS, RATE = 3, 1e-3


class Training:
    """Trains one model, from the same start in every call: the loss and all gradients of every step, by name.

    `settled`: every write ends before the backward begins, so that it reads however slow the drive is.
    """

    def __init__(self, build: Builder, dropout: float, device: str = "cpu", *, settled: bool = True) -> None:
        torch.manual_seed(0)
        self._case = build(dropout).on(device)
        self._model = self._case.model.train()
        self._start = copy.deepcopy(self._model.state_dict())
        self.settled = settled

    def __call__(self, compile: Compile) -> dict[str, Tensor]:
        self._model.load_state_dict(self._start)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)
        optimizer.zero_grad()
        compiled, values = compile(self._model), {}
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = self._case.loss(compiled(**self._case.inputs))
            if self.settled:
                settle()
            loss.backward()
            values[f"{step} loss"] = loss.detach().reshape(1).clone()
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    values[f"{step} {name}"] = parameter.grad.detach().clone().contiguous()
            optimizer.step()
            optimizer.zero_grad()
        return values


@dataclass(frozen=True)
class Trial:
    """What a run computed; bytes of one step; graph breaks while compiling."""

    values: Mapping[str, Tensor]
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    read_bytes: int
    graph_breaks: int


def trial(training: Training, compile: Compile) -> Trial:
    torch._dynamo.utils.counters.clear()
    values, found = run(training, compile), ssd_fx.stats()  # of plain Inductor all 0
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    sizes = (found.saved_bytes, found.offloaded_bytes, found.written_bytes, found.read_bytes)
    return Trial(values, *(nbytes // STEPS for nbytes in sizes), breaks)


def near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Within what other kernels of the same operators make of float32 in the first step. What is a millionth of the
    largest value is nothing but rounding, as gradients are that a normalization behind them makes zero; and a model
    that normalizes over eight values (EfficientNet) takes steps that double every rounding."""
    if set(found) != set(expected):
        return False
    first = [name for name in found if name.startswith("0 ")]
    least = 1e-6 * max(float(expected[name].abs().max()) for name in first)
    return all(close(found[name], expected[name], least=least) for name in first)
