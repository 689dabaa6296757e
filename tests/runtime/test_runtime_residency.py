"""More rests in memory while the graph waits for the drive, and less again when it does not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx.runtime.adapt.residency import LONGEST, QUIET_STEPS, WAITS, WARM, Residency
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.step_clock import StepClock
from ssd_fx.runtime.stores import get_store
from tests.runtime.engines import Clock, HeldEngine, Lane, around
from tests.runtime.harness import begin, config_json, load, raw, release, store

MIB = 1 << 20


class Training:
    """Steps of one second and more, on a drive that moves `rate` bytes without a wait."""

    def __init__(self, least: int = 0, most: int = sys.maxsize, free: int = 1 << 40, waits: float = WAITS) -> None:
        self.now, self.rate, self.saved = 0.0, 100 * MIB, 80 * MIB
        self.free = free  # bytes, when nothing is resident
        self.resident = 0
        self.residency = Residency(least, most, lambda: self.free - self.resident, lambda: self.now, waits)
        self.number = 1
        self.residency.begins(self.number)

    def step(self) -> float:
        """The seconds that the step waited."""
        self.resident = min(self.saved, self.residency.nbytes)
        self.residency.stored(self.saved, self.resident)
        waited = max(0.0, (self.saved - self.resident) / self.rate - 1.0)
        self.residency.loads(self.resident)
        self.resident = 0
        self.residency.waited(waited)
        self.now += 1.0 + waited
        self.number += 1
        self.residency.begins(self.number)
        return waited

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]


def test_a_drive_that_keeps_up_changes_nothing() -> None:
    training = Training()
    assert not any(training.steps(50))
    assert training.residency.nbytes == 0


def test_waiting_that_the_user_allows_changes_nothing() -> None:
    """Every step waits a sixth of its time: no more than `slowdown` of a fifth, and more than one of a tenth."""
    for waits, stays in ((0.2, False), (0.1, True)):
        training = Training(waits=waits)
        training.rate = training.saved / 1.2
        training.steps(20)
        assert bool(training.residency.nbytes) == stays


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
    assert 60 * MIB <= training.residency.nbytes <= 80 * MIB
    training.rate = 100 * MIB
    assert not any(training.steps(LONGEST + 5 * QUIET_STEPS))
    assert training.residency.nbytes == 0


def test_trials_become_rare() -> None:
    training = Training()
    training.rate = 40 * MIB
    waits = training.steps(400)
    assert sum(wait > 0.01 for wait in waits[200:]) <= 14


def test_the_first_steps_are_not_judged() -> None:
    training = Training()
    training.rate = 1 * MIB
    training.steps(WARM + 1)
    assert training.residency.nbytes == 0
    training.steps(1)
    assert training.residency.nbytes > 0


@pytest.mark.parametrize(("least", "most"), [(0, 0), (30 * MIB, 0), (0, 10 * MIB), (30 * MIB, 40 * MIB)])
def test_the_limits_hold(least: int, most: int) -> None:
    training = Training(least, most)
    training.rate = 1 * MIB
    for _ in range(50):
        training.step()
        assert least <= training.residency.nbytes <= max(least, most)


def test_half_of_the_free_memory_is_left() -> None:
    training = Training(free=10 * MIB)
    training.rate = 1 * MIB
    training.steps(WARM + 10)
    assert training.residency.nbytes == 5 * MIB


def test_less_rests_when_others_take_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(free=200 * MIB)
    training.rate = 20 * MIB
    training.steps(WARM + 2)
    assert training.residency.nbytes == 60 * MIB
    training.free = 40 * MIB
    with caplog.at_level(logging.INFO, "ssd_fx"):
        training.steps(1)
    assert training.residency.nbytes == 20 * MIB
    assert caplog.messages == ["memory is short: 20.0 MiB more than planned may now stay in memory"]
    training.free = 0
    training.steps(1)
    assert training.residency.nbytes == 0


def test_free_memory_is_that_of_the_backward() -> None:
    """It is looked at once in a step, while most is resident: between the steps much looks free that they need."""
    training = Training()
    training.rate = 1 * MIB
    resident: list[int] = []

    def look() -> int:
        resident.append(training.resident)
        return 10 * MIB

    training.residency._available_bytes = look
    training.steps(WARM + 3)
    assert resident == [0] * (WARM + 2) + [5 * MIB]


def test_memory_is_read_ahead_into_only_where_something_was_resident() -> None:
    """Binding tensors are written at once, whatever the residency."""
    training = Training()
    training.rate = 20 * MIB
    training.steps(WARM + 2)
    residency = training.residency
    assert residency.more == 60 * MIB
    assert residency.spare(0) == 0, "this step stored nothing yet"
    residency.stored(10 * MIB, 0)
    assert residency.spare(0) == 0, "it never was resident"
    residency.stored(10 * MIB, 10 * MIB)
    assert residency.spare(10 * MIB) == 0
    assert residency.spare(4 * MIB) == 6 * MIB
    residency.stored(90 * MIB, 100 * MIB)
    assert residency.spare(0) == 60 * MIB


def test_one_late_step_is_an_accident() -> None:
    training = Training()
    for _ in range(10):
        training.rate = 20 * MIB
        training.step()
        training.rate = 100 * MIB
        training.step()
    assert training.residency.nbytes == 0


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
    residency, steps = Residency(0, sys.maxsize, lambda: 1 << 40, clock=lambda: now[0]), StepClock()
    for _ in range(WARM + 3):
        for _ in range(3):
            steps.begin(now[0], lambda: 0)
            residency.begins(steps.step)
            residency.stored(MIB, 0)
            now[0] += 1
        steps.turn()
        residency.loads(0)
        residency.waited(1.0)
        now[0] += 1
    assert residency.nbytes == pytest.approx(3 * MIB / 4, abs=2)


def test_the_forward_of_a_checkpoint_is_in_no_step_of_its_own() -> None:
    """It runs within a backward. Else the second half of each backward would be judged as a step that never waits."""
    training = Training()
    for _ in range(WARM + 3):
        training.residency.stored(training.saved, 0)
        training.residency.loads(0)
        training.residency.waited(1.0)
        training.now += 1.0
        training.residency.begins(0)
        training.residency.loads(0)
        training.now += 1.0
        training.number += 1
        training.residency.begins(training.number)
    assert training.residency.nbytes > 0


class Worked(Clock):
    """The seconds of a training that computes, waits for its drive, and does nothing else."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


clock = Worked()


N, TENSORS = MIB // 4, 8


@pytest.fixture
def slow_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Configurations with a drive of one lane, where the runtime reads that clock too."""
    monkeypatch.setattr("ssd_fx.runtime.store.now", clock)
    monkeypatch.setattr("ssd_fx.runtime.device.arrival.now", clock)
    lane = Lane(clock)
    name = around(lambda inner: HeldEngine(inner, lane, lane), "memory")

    def make(**options: object) -> str:
        config = config_json(tmp_path, name, budget="auto", slowdown=0.02, prefetch=2 * MIB, **options)
        get_store(config).residency._clock = clock
        return config

    return make


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
    resident = sum(lookup(h).state.where == "memory" and lookup(h).write is None for h in handles)
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
    assert isinstance(drive, HeldEngine)
    assert [train(config) for _ in range(6)] == [(0.0, 0)] * 6
    drive.writes.s_per_byte = 0.02 / MIB
    slow = [train(config) for _ in range(20)]
    assert slow[0] == (pytest.approx(0.14, abs=0.02), 0)
    assert [wait < 0.002 for wait, _ in slow[4:8]] == [True] * 4
    assert 4 <= slow[-1][1] < TENSORS
    drive.writes.s_per_byte = 0.0
    steps = [train(config) for _ in range(LONGEST)]
    assert max(wait for wait, _ in steps) == 0
    assert steps[-1][1] == 0


def test_what_still_rests_is_no_room_to_read_ahead(tmp_path: Path) -> None:
    """Two tensors of 1 MiB rest. The bytes of the one that the backward has taken may be read ahead."""
    config = config_json(tmp_path)
    found = get_store(config)
    found.residency.nbytes = 3 * MIB
    xs = [torch.zeros(N) for _ in range(2)]
    handles = [store(x, config, slot=i) for i, x in enumerate(xs)]
    assert [lookup(h).state.where for h in handles] == ["memory"] * 2
    assert found._spare() == 0
    load(handles[1], xs[1])
    del handles[1]
    assert lookup(handles[0]).state.where == "memory"
    assert found._spare() == MIB


def test_without_adapt_nothing_more_rests(slow_config: Callable[..., str]) -> None:
    config = slow_config(adapt=False)
    drive = get_store(config).engine
    assert isinstance(drive, HeldEngine)
    drive.writes.s_per_byte = 0.02 / MIB
    assert [resident for _, resident in (train(config) for _ in range(8))] == [0] * 8
