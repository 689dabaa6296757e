"""The callbacks, in the trainers that they are for. They need `pip install -e '.[trainers]'`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ssd_fx.integrations import meter
from ssd_fx.integrations.meter import NOW, PER_STEP
from ssd_fx.runtime.stats import Stats

NAMES = {f"ssd_fx/{name}" for name in (*PER_STEP, *NOW)}
OPTIONS = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0, "inflight": "64KiB"}
WIDTH, STEPS = 32, 4


class Model(nn.Module):
    """Saves what a sigmoid returns for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


@pytest.fixture
def accelerator() -> Iterator[None]:
    """What an Accelerator was told holds for the process, until it is forgotten."""
    state = pytest.importorskip("accelerate.state", reason="needs pip install -e '.[trainers]'")
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


def test_no_life_of_drives_is_logged_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A life of 0 days looks as if the drives were worn out."""
    found = Stats(disk_bytes=64, drive_tbw=600)
    monkeypatch.setattr(meter, "stats", lambda: found)
    ours = meter.Meter()
    assert set(ours.read(1)) == NAMES
    found.drive_bytes_s = 1e9
    later = ours.read(2)
    assert set(later) - NAMES == {"ssd_fx/drive_tb_per_day", "ssd_fx/drive_life_days"}
    assert later["ssd_fx/drive_life_days"] == found.drive_life_days
    found.drive_tbw = 0.0
    assert set(ours.read(3)) - NAMES == {"ssd_fx/drive_tb_per_day"}


def test_hugging_face(tmp_path: Path, accelerator: None) -> None:
    transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[trainers]'")
    from ssd_fx.integrations.hf import SsdFxCallback

    reported: list[dict[str, float]] = []

    class Report(transformers.TrainerCallback):  # type: ignore[misc, name-defined]  # added first, as those for W&B are
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            reported.append(dict(logs))

    model = Model()
    model.compile(backend="ssd_fx", options=OPTIONS)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, logging_steps=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = [{"x": x} for x in torch.randn(16 * STEPS, WIDTH)]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Report()])
    trainer.add_callback(SsdFxCallback(trainer))
    trainer.train()
    ours = [entry for entry in reported if NAMES & set(entry)]
    assert len(ours) == STEPS // 2
    assert all(set(entry) >= NAMES for entry in ours)
    assert all(entry["ssd_fx/offloaded_bytes"] > 2 * 8 * WIDTH * 4 for entry in ours)  # two forwards of 8 rows
    assert [entry["step"] for entry in trainer.state.log_history if NAMES & set(entry)] == [2, 4]


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="needs pip install -e '.[trainers]'")
    from ssd_fx.integrations.lightning import SsdFxCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self.model(batch[0])["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Logger(lightning.pytorch.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.found.append((step, metrics))

    logger = Logger()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, accumulate_grad_batches=2, log_every_n_steps=2, logger=logger,
        callbacks=[SsdFxCallback()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.randn(16 * STEPS, WIDTH)), batch_size=8)
    trainer.fit(torch.compile(Module(), backend="ssd_fx", options=OPTIONS), loader)
    ours = [(step, metrics) for step, metrics in logger.found if NAMES & set(metrics)]
    assert [step for step, _ in ours] == [2, 4]
    assert all(set(metrics) == NAMES for _, metrics in ours)
    assert all(metrics["ssd_fx/offloaded_bytes"] > 2 * 8 * WIDTH * 4 for _, metrics in ours)
