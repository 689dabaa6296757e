"""For the Trainer of Hugging Face: logits that it does not read, and a callback.

loss_only(model)
model.compile(backend="ssd_fx", options=...)
trainer = Trainer(model, arguments, ...)
trainer.add_callback(SsdFxCallback(trainer))
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from ssd_fx.integrations.meter import Meter


def loss_only(model: nn.Module) -> None:
    """In training, let a model that has computed its loss return that alone. Call it before the model is compiled.

    Else the logits are an output of the compiled graph, which stays in memory until the backward. What has no loss, and
    what the model returns in evaluation, stays as it is. `del model.forward` undoes it.

    A forward hook would do the same, but Dynamo leaves those of the outermost module outside of the graph.

    Raises:
        ValueError: `model.forward` is no method, because somebody has put something else in its place.
    """
    bound: Any = model.forward
    if not inspect.ismethod(bound):
        raise ValueError(
            f"forward of {type(model).__name__} is a {type(bound).__name__}, and loss_only needs a method; right would "
            "be a model as its class made it, not yet compiled: load it without device_map, or call "
            "accelerate.hooks.remove_hook_from_module(model) first"
        )
    inner = bound.__func__  # bound again below, so that a copy of the model calls its own

    @functools.wraps(inner)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        output = inner(self, *arguments, **named)
        if not self.training or getattr(output, "loss", None) is None:
            return output
        return type(output)(loss=output.loss)

    model.forward = types.MethodType(forward, model)


class SsdFxCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not looked at when this is checked
    """Logs what ssd_fx did, whenever the Trainer logs a loss, to everything that the Trainer reports to.

    It logs an entry of its own, through the Trainer. Callbacks run in the order in which they were added, so it could
    add to an entry only after those that report have handled it.
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
