"""For the Trainer of Hugging Face: logits that it does not read, and a callback.

model.register_forward_hook(loss_only)
model.compile(backend="ssd_fx", options=...)
trainer = Trainer(model, arguments, ...)
trainer.add_callback(SsdFxCallback(trainer))
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from ssd_fx.integrations.meter import Meter


def loss_only(model: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook: in training, a model that has computed its loss returns that alone.

    Else the logits are an output of the compiled graph too. They stay in memory, whoever reads them, and the backward
    gets a gradient for them: zeros, as many bytes again. Register it before the model is compiled. `output` is a
    `ModelOutput`; what has no loss, and what a model returns in evaluation, stays as it is.
    """
    if not model.training or getattr(output, "loss", None) is None:
        return None  # torch then takes the output as it is
    return type(output)(loss=output.loss)


class SsdFxCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not looked at when this is checked
    """Logs what ssd_fx did, whenever the Trainer logs a loss, to everything that the Trainer reports to.

    It needs the Trainer, because callbacks are called in the order in which they were added: those that report have
    their entry by the time that this one could add to it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._meter = Meter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts from the step that training starts or resumes at."""
        self._meter.start(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Adds an entry of its own behind the one of a loss."""
        if logs and "loss" in logs:
            self._trainer.log(self._meter.read(state.global_step))
