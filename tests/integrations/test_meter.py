"""What the callbacks log: means over training steps, whatever the number of graphs and of resets."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ssd_fx
from ssd_fx import integrations
from ssd_fx.integrations.meter import NOW, PER_STEP, Meter
from ssd_fx.runtime import stats


def test_means_over_the_steps_since_the_last_call() -> None:
    meter, counters = Meter(), stats.counters("a")
    counters.written_bytes, counters.stall_s = 600, 0.3
    first = meter.read(3)
    assert (first["ssd_fx/written_bytes"], first["ssd_fx/stall_s"]) == (200, pytest.approx(0.1))
    counters.written_bytes += 100
    stats.counters("b").written_bytes = 100
    assert meter.read(4)["ssd_fx/written_bytes"] == 200


def test_after_a_reset_it_counts_from_there() -> None:
    meter = Meter()
    stats.counters("a").written_bytes = 600
    meter.read(3)
    ssd_fx.reset_stats()
    stats.counters("a").written_bytes = 80
    assert meter.read(5)["ssd_fx/written_bytes"] == 40


def test_a_resume_counts_from_its_step_and_from_what_was_done_before() -> None:
    meter, counters = Meter(), stats.counters("a")
    counters.written_bytes = 600
    meter.start(100_000)
    counters.written_bytes += 500
    assert meter.read(100_010)["ssd_fx/written_bytes"] == 50


def test_hugging_face_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    callback = made("hf", "transformers", monkeypatch)(SimpleNamespace(log=logged.append))
    stats.counters("a").written_bytes = 600
    callback.on_train_begin(None, SimpleNamespace(global_step=100_000), None)
    stats.counters("a").written_bytes += 500
    callback.on_log(None, SimpleNamespace(global_step=100_010), None, logs={"loss": 1.0})
    assert [entry["ssd_fx/written_bytes"] for entry in logged] == [50]


def test_lightning_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that it resumes at is not logged once more by a batch that is accumulated."""
    logged: dict[int, float] = {}
    logger = SimpleNamespace(log_metrics=lambda found, step: logged.update({step: found["ssd_fx/written_bytes"]}))
    trainer = SimpleNamespace(global_step=100_000, log_every_n_steps=10, loggers=[logger])
    callback = made("lightning", "lightning", monkeypatch)()
    stats.counters("a").written_bytes = 600
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, None, None, 0)
    trainer.global_step = 100_010
    stats.counters("a").written_bytes += 500
    callback.on_train_batch_end(trainer, None, None, None, 1)
    assert logged == {100_010: 50}


def test_lightning_that_never_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`log_every_n_steps=0` means so there, and is no step to divide by."""
    logged: list[int] = []
    logger = SimpleNamespace(log_metrics=lambda found, step: logged.append(step))
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=0, loggers=[logger])
    callback = made("lightning", "lightning", monkeypatch)()
    callback.on_train_start(trainer, None)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, None, None, None, 0)
    assert logged == []


def made(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The callback, on a library that has nothing but the names that it imports."""
    names = ("Callback", "LightningModule", "Trainer", "TrainerCallback")
    stub = ModuleType(library)
    vars(stub).update(dict.fromkeys(names, object))
    monkeypatch.setitem(sys.modules, library, stub)
    return runpy.run_path(str(Path(integrations.__file__).with_name(f"{name}.py")))["SsdFxCallback"]


def test_names_are_the_same_at_any_time() -> None:
    before = set(Meter().read(0))
    stats.counters("a").begin(100, 50)
    assert set(Meter().read(1)) == before == {f"ssd_fx/{name}" for name in (*PER_STEP, *NOW)}
