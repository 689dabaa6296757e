"""A thousand steps on the device that executes late: what they take is no more at their end than in their middle."""

from __future__ import annotations

import contextlib
import gc
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from ssd_fx.runtime import entries, graphs
from ssd_fx.runtime.deaths import when_idle
from ssd_fx.runtime.device import clock, device_trace
from ssd_fx.runtime.memory import pinned
from ssd_fx.runtime.stores import close_stores
from tests.runtime.fake_gpu import FakeEvent, FakeGpu, installed
from tests.runtime.harness import begin, in_a_child, op, raw, start_load, store, wait

STEPS, THREADS, N = 500, 2, 3000  # steps of each thread
SHORT_OF_MEMORY = 4 * 4 * N  # may be in flight; a step stores more


class Lost(Exception):
    """A step that does not end well."""


class Held(NamedTuple):
    pinned_bytes: int
    events: int
    streams: int


class Trainer:
    """Steps of one thread: with a backward, without one, and with an exception in either half."""

    def __init__(self, gpu: FakeGpu, number: int) -> None:
        self.gpu, self.drawn, self.graph = gpu, random.Random(number), f"soak{number}"
        self.config = json.dumps({"engine": "memory", "prefetch": 4 * N, "inflight": SHORT_OF_MEMORY + number})
        self.compiled: Callable[[], None] = self._compile()

    def step(self) -> None:
        if self.drawn.random() < 0.05:  # the model is made anew, and its store ends
            del self.compiled
            entries.living()
            self.compiled = self._compile()
        with contextlib.suppress(Lost):
            self._backward(self._forward())

    def _compile(self) -> Callable[[], None]:
        def compiled() -> None: ...

        graphs.uses(compiled, self.config)
        return compiled

    def _forward(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        begin(self.config, self.graph, offloaded=1)
        stored = []
        for slot in range(self.drawn.randrange(2, 8)):
            values = torch.full((N + self.drawn.randrange(3) * 1024,), float(self.drawn.randrange(100)))
            x = self.gpu.tensor(values)
            handle = store(x, self.config, slot, 2 * slot, self.graph, later=self.drawn.random() < 0.2)
            op.wait_store_(handle, x, 2 * slot + 1, self.drawn.random() < 0.8, self.drawn.random() < 0.3)
            stored.append((handle, values))
            self._may_fail()
        if self.drawn.random() < 0.1:
            raise Lost("nobody wants its gradients")
        return stored

    def _backward(self, stored: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        while stored:
            handle, values = stored.pop()
            y = start_load(handle, values, consume=self.drawn.random() < 0.8, donate=self.drawn.random() < 0.8)
            self._may_fail()
            assert self.gpu.bytes_of(wait(y, handle)) == raw(values)

    def _may_fail(self) -> None:
        if self.drawn.random() < 0.02:
            raise Lost("an exception of the user")


def held(gpu: FakeGpu) -> Held:
    """What is held between two steps, when the device has done all that it was given."""
    gpu.finish()
    entries.living()
    gc.collect()
    for function in when_idle:
        function()
    return Held(pinned.pinned_bytes(), FakeEvent.alive, len(gpu.sides))


@pytest.mark.parametrize("order", [1, "compute first"])
def test_a_thousand_steps_hold_no_more_than_some(monkeypatch: pytest.MonkeyPatch, order: str | int) -> None:
    monkeypatch.setattr(pinned, "LEAST", 4 * N)
    monkeypatch.setattr(device_trace, "UNREAD", 16)
    gc.collect()  # an engine of the test before
    before = pinned.pinned_bytes(), FakeEvent.alive
    seen: list[Held] = []

    def train(trainer: Trainer) -> None:
        for _ in range(10):
            trainer.step()

    with installed(order) as gpu, ThreadPoolExecutor(THREADS) as pool:
        trainers = [Trainer(gpu, number) for number in range(THREADS)]
        for number in range(STEPS // 10):
            list(pool.map(train, trainers))
            seen.append(held(gpu))
            if number % 10 == 0:
                assert in_a_child(lambda: gc.collect() >= 0 and entries.living() == [])
        half = len(seen) // 2
        for what in Held._fields:
            early, late = (max(getattr(each, what) for each in part) for part in (seen[:half], seen[half:]))
            assert late <= 1.25 * early, f"{what}: {early} in the first half, {late} in the second"
        del trainers
        close_stores()
        device_trace.clear()
        clock.forget()
    gc.collect()
    assert pinned.pinned_bytes() == before[0]
    assert FakeEvent.alive <= before[1] + 16
