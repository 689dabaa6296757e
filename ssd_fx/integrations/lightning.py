"""A callback for Lightning: `Trainer(callbacks=[SsdFxCallback()])`."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer

from ssd_fx.integrations.meter import Meter


class SsdFxCallback(Callback):  # type: ignore[misc]  # the library is not looked at when this is checked
    """Logs what ssd_fx did to all loggers of the Trainer, every `log_every_n_steps` steps, and never for 0."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._logged = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts from the step that training starts or resumes at."""
        self._logged = trainer.global_step
        self._meter.start(self._logged)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs once per training step, whatever the number of batches that a step accumulates."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if step == self._logged or not every or step % every:
            return
        self._logged = step
        figures = self._meter.read(step)
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)
