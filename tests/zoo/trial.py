"""One model trained for three steps in one way: what it computed, saved and moved."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ssd_fx
from tests.faults.toys import settle
from tests.models import close
from tests.zoo.models import Builder

STEPS, RATE = 3, 1e-3


@dataclass(frozen=True)
class Trial:
    """`values`: the loss and all gradients of every step, by name; bytes of one step; graph breaks while compiling."""

    values: Mapping[str, Tensor]
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    read_bytes: int
    graph_breaks: int

    def apart(self, other: Trial) -> dict[str, float]:
        """How far the values that are not the same bits are apart, in the order in which they were computed. Infinite
        for those that one trial alone has."""
        both = [name for name in self.values if name in other.values]
        pairs = {name: (self.values[name], other.values[name]) for name in both}
        found = {name: _apart(a, b) for name, (a, b) in pairs.items() if not _same_bits(a, b)}
        return found | dict.fromkeys(sorted(set(self.values) ^ set(other.values)), math.inf)

    def difference(self, other: Trial) -> float:
        """The largest of any value; infinite if one is there in one trial only."""
        return max(self.apart(other).values(), default=0.0)

    def close_to(self, other: Trial) -> bool:
        """Within what other kernels of the same operators make of float32 in the first step. What is a millionth of the
        largest value is nothing but rounding, as gradients are that a normalization behind them makes zero; and a
        model that normalizes over eight values (EfficientNet) takes steps that double every rounding."""
        if set(self.values) != set(other.values):
            return False
        first = [name for name in self.values if name.startswith("0 ")]
        least = 1e-6 * max(float(other.values[name].abs().max()) for name in first)
        return all(close(self.values[name], other.values[name], least=least) for name in first)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def _apart(a: Tensor, b: Tensor) -> float:
    """Of values that are not the same bits: infinite where no number tells how far, and never 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    apart = float((a.double() - b.double()).abs().max())
    return max(apart, math.ulp(0.0)) if math.isfinite(apart) else math.inf


def train(build: Builder, dropout: float, options: Mapping[str, Any] | None) -> Trial:
    """`options`: of ssd_fx; None for plain Inductor."""
    return Compiled(build, dropout, options).train(settled=True)


class Compiled:
    """A model that trains from the same start as often as one likes, compiled once."""

    def __init__(self, build: Builder, dropout: float, options: Mapping[str, Any] | None, device: str = "cpu") -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self._case = build(dropout).on(device)
        self._model = self._case.model.train()
        self._start = copy.deepcopy(self._model.state_dict())
        self._compiled = (
            torch.compile(self._model, backend="inductor") if options is None else _ours(self._model, options)
        )

    def train(self, *, settled: bool = False) -> Trial:
        """`settled`: every write ends before the backward begins, so that it reads however slow the drive is."""
        torch._dynamo.utils.counters.clear()
        ssd_fx.reset_stats()
        self._model.load_state_dict(self._start)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)
        optimizer.zero_grad()
        values = {}
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = self._case.loss(self._compiled(**self._case.inputs))
            if settled:
                settle()
            loss.backward()
            values[f"{step} loss"] = loss.detach().reshape(1).clone()
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    values[f"{step} {name}"] = parameter.grad.detach().clone().contiguous()
            optimizer.step()
            optimizer.zero_grad()
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        found = ssd_fx.stats()  # of plain Inductor all 0
        sizes = (found.saved_bytes, found.offloaded_bytes, found.written_bytes, found.read_bytes)
        return Trial(values, *(nbytes // STEPS for nbytes in sizes), breaks)


def _ours(model: torch.nn.Module, options: Mapping[str, Any]) -> Any:
    return torch.compile(model, backend=ssd_fx.backend, options=dict(options))


@contextmanager
def deterministic() -> Iterator[None]:
    """Gradients that two runs of the same code agree on, where the operators have such a mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
