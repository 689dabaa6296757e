"""More rests in memory while the graph waits for the drive, and less again when it does not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.entries import State, lookup
from ssd_fx.runtime.room import LONGEST, PATIENCE, WARM, Room
from ssd_fx.runtime.store import get_store
from tests.runtime.engines import Wrapped, registered
from tests.runtime.harness import begin, config_json, load, raw, release, store

MIB = 1 << 20


class Training:
    """Steps of one second and more, on a drive that moves `rate` bytes without a wait."""

    def __init__(self, least: int = 0, most: int = sys.maxsize, free: int = sys.maxsize) -> None:
        self.now, self.rate, self.saved = 0.0, 100 * MIB, 80 * MIB
        self.room = Room(least, most, lambda: free, lambda: self.now)
        self.room.forward()

    def step(self) -> float:
        """The seconds that the step waited."""
        self.room.stored(self.saved)
        moved = max(0, self.saved - self.room.nbytes)
        waited = max(0.0, moved / self.rate - 1.0)
        self.room.loads()
        self.room.waited(waited)
        self.now += 1.0 + waited
        self.room.forward()
        return waited

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]


def test_a_drive_that_keeps_up_changes_nothing() -> None:
    training = Training()
    assert not any(training.steps(50))
    assert training.room.nbytes == 0


def test_a_slow_drive_and_a_fast_one_again() -> None:
    """At most as much stays as the drive cannot move, and a little more; then nothing."""
    training = Training()
    training.steps(10)
    training.rate = 20 * MIB
    waits = training.steps(40)
    assert waits[0] > 2
    assert not any(waits[2:6])
    assert sum(wait > 0 for wait in waits[6:]) <= 8  # less was tried in vain
    assert max(waits[6:]) < 0.5
    assert 60 * MIB <= training.room.nbytes <= 80 * MIB
    training.rate = 100 * MIB
    assert not any(training.steps(LONGEST + 5 * PATIENCE))
    assert training.room.nbytes == 0


def test_trials_become_rare() -> None:
    training = Training()
    training.rate = 40 * MIB
    waits = training.steps(400)
    assert sum(wait > 0.01 for wait in waits[200:]) <= 14


def test_the_first_steps_are_not_judged() -> None:
    training = Training()
    training.rate = 1 * MIB
    training.steps(WARM + 1)
    assert training.room.nbytes == 0
    training.steps(1)
    assert training.room.nbytes > 0


@pytest.mark.parametrize(("least", "most"), [(0, 0), (30 * MIB, 0), (0, 10 * MIB), (30 * MIB, 40 * MIB)])
def test_the_limits_hold(least: int, most: int) -> None:
    training = Training(least, most)
    training.rate = 1 * MIB
    for _ in range(50):
        training.step()
        assert least <= training.room.nbytes <= max(least, most)


def test_half_of_the_free_memory_is_left() -> None:
    training = Training(free=10 * MIB)
    training.rate = 1 * MIB
    training.steps(WARM + 2)
    assert training.room.nbytes == 5 * MIB


def test_one_late_step_is_an_accident() -> None:
    training = Training()
    for _ in range(10):
        training.rate = 20 * MIB
        training.step()
        training.rate = 100 * MIB
        training.step()
    assert training.room.nbytes == 0


def test_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    training.rate = 20 * MIB
    with caplog.at_level(logging.INFO, "ssd_fx"):
        training.steps(WARM + 2)
    assert caplog.messages == [
        "the last two steps waited 75% of their time: 60.0 MiB more than planned may now stay in memory"
    ]


def test_micro_batches_and_several_graphs() -> None:
    """A step goes from the first forward after a backward to the next one."""
    now = [0.0]
    room = Room(0, sys.maxsize, clock=lambda: now[0])
    for _ in range(WARM + 3):
        for _ in range(3):
            room.forward()
            room.stored(MIB)
            now[0] += 1
        room.loads()
        room.waited(1.0)
        now[0] += 1
    assert room.nbytes == pytest.approx(3 * MIB / 4, abs=2)


class Clock:
    """The seconds of a training that computes, waits for its drive, and does nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


class Slow(Wrapped):
    """A drive of one lane that takes `s_per_byte` of that clock."""

    s_per_byte = 0.0

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._free_at = 0.0

    def write(self, extent: Extent, memory: Memory) -> Completion:
        return _Later(super().write(extent, memory), lambda: self._queue(memory.nbytes))

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return _Later(super().read(extent, memory), lambda: self._queue(memory.nbytes))

    def _queue(self, nbytes: int) -> float:
        """The time at which a transfer that is queued now has ended."""
        self._free_at = max(self._free_at, clock.now) + nbytes * self.s_per_byte
        return self._free_at


class _Later:
    def __init__(self, inner: Completion, queue: Callable[[], float]) -> None:
        self._inner, self._queue, self._ends = inner, queue, 0.0

    def start(self) -> None:
        self._ends = self._queue()
        self._inner.start()

    def done(self) -> bool:
        return clock.now >= self._ends and self._inner.done()

    def wait(self) -> None:
        clock.now = max(clock.now, self._ends)
        self._inner.wait()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def span(self) -> tuple[float, float]:
        return self._inner.span()


N, TENSORS = MIB // 4, 8


@pytest.fixture
def slow_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Configurations with such a drive, where the runtime reads that clock."""
    monkeypatch.setattr("ssd_fx.runtime.store.now", clock)
    monkeypatch.setattr("ssd_fx.runtime.writer.now", clock)
    with registered(Slow, "memory") as name:

        def make(**options: object) -> str:
            config = config_json(tmp_path, name, resident_at_most=1 << 40, prefetch=2 * MIB, **options)
            get_store(config).room._clock = clock
            return config

        yield make


def train(config: str) -> tuple[float, int]:
    """(seconds waited, tensors that were resident) of a step of eight tensors of 1 MiB, whose values are right."""
    before = ssd_fx.stats().stall_s
    begin(config, offloaded=TENSORS * MIB)
    handles = []
    for i in range(TENSORS):
        x = torch.full((N,), float(i))
        handles.append(store(x, config, slot=i, seq=2 * i))
        release(handles[-1], x, seq=2 * i + 1)
        del x
        clock.now += 0.01
    resident = sum(lookup(h).state is State.IN_MEMORY and lookup(h).write is None for h in handles)
    for i in reversed(range(TENSORS)):
        y = load(handles[i], torch.empty(N))
        assert raw(y) == raw(torch.full((N,), float(i)))
        del y, handles[i]
        clock.now += 0.01
    return ssd_fx.stats().stall_s - before, resident


def test_a_drive_that_gets_slow_and_fast_again(slow_config: Callable[..., str]) -> None:
    """The waits end within four steps. Nothing more rests soon after the drive is fast again."""
    config = slow_config(adapt=True)
    drive = get_store(config).engine
    assert isinstance(drive, Slow)
    assert [train(config) for _ in range(6)] == [(0.0, 0)] * 6
    drive.s_per_byte = 0.02 / MIB
    slow = [train(config) for _ in range(20)]
    assert slow[0] == (pytest.approx(0.14, abs=0.02), 0)
    assert [wait < 0.002 for wait, _ in slow[4:8]] == [True] * 4
    assert 4 <= slow[-1][1] < TENSORS
    drive.s_per_byte = 0.0
    steps = [train(config) for _ in range(LONGEST)]
    assert max(wait for wait, _ in steps) == 0
    assert steps[-1][1] == 0


def test_without_adapt_nothing_more_rests(slow_config: Callable[..., str]) -> None:
    config = slow_config(adapt=False)
    drive = get_store(config).engine
    assert isinstance(drive, Slow)
    drive.s_per_byte = 0.02 / MIB
    assert [resident for _, resident in (train(config) for _ in range(8))] == [0] * 8
