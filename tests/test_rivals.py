"""What needs no drive beside our rows: layers to put checkpoints around, figures, and what to take."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ssd_fx
from examples.train_gpt import GPT
from ssd_fx.report.budgets import Estimate, Prediction
from ssd_fx.rivals import CHECKPOINT, budgeted, checkpointed, layers_of
from tests.bitwise import assert_same_bits
from tests.models import SMALL, batch

TOY = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0}


class Layer(nn.Module):
    def __init__(self, width: int = 64, within: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.parts = nn.ModuleList(Layer(width) for _ in range(within))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x + scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Layers in two containers, of which one is in another. Each gets a keyword argument."""

    def __init__(self, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(make() for _ in range(3))})
        self.decoder = nn.Sequential(make(), make())

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for layer in self.encoder["layers"]:  # type: ignore[union-attr]
            x = layer(x, scale=0.5)
        return self.decoder(x).square().mean()


def test_layers_are_those_that_repeat_most() -> None:
    """Linear and its like are none, although one container has more of them."""
    model = Model()
    found = layers_of(model)
    assert found == [*model.encoder["layers"], *model.decoder]  # type: ignore[misc]
    assert layers_of(Model(partial(Layer, within=2))) != found
    assert {len(each.parts) for each in layers_of(Model(partial(Layer, within=2)))} == {2}, "none is within another"
    assert layers_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == []
    assert layers_of(nn.ModuleList([Layer()])) == []


def test_layers_of_what_a_function_refers_to() -> None:
    model = Model()

    class Trainer:
        def __init__(self) -> None:
            self.net = model

        def step(self, x: Tensor) -> Any:
            return self.net(x)

    assert layers_of(lambda x: model(x)) == layers_of(model)
    assert layers_of(Trainer().step) == layers_of(model)
    assert layers_of(torch.sin) == []


def test_checkpoints_change_nothing_for_good() -> None:
    model, x = Model(), torch.randn(8, 64)
    model(x).backward()
    expected, saved = [p.grad for p in model.parameters()], [0, 0]

    def count(at: int) -> Callable[[Tensor], Tensor]:
        def packed(tensor: Tensor) -> Tensor:
            saved[at] += 1
            return tensor

        return packed

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(count(0), lambda x: x):
        model(x)
    with checkpointed(layers_of(model)):
        with torch.autograd.graph.saved_tensors_hooks(count(1), lambda x: x):
            loss = model(x)
        loss.backward()
    assert saved[1] < saved[0]
    assert_same_bits([p.grad for p in model.parameters()], expected)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_they_are_in_the_table(inner: str) -> None:
    """By the same planner with the same rates. Nothing is written, whatever the options ask for."""
    options = TOY | {"inner": inner, "offload": ["blocks.0"]}
    found = ssd_fx.estimate(GPT(SMALL), batch(), budgets=[0, 1.0], options=options)
    names = [row.name for row in found.rivals]
    assert names[0] == CHECKPOINT
    assert budgeted(0.75) in names
    keep = ssd_fx.estimate(GPT(SMALL), batch(), budgets=[1.0], options=TOY | {"inner": inner}, rivals=False)
    (all_,) = keep.predictions
    assert keep.rivals == ()
    for row in found.rivals:
        assert row.peak_bytes < all_.peak_bytes
        assert row.step_s > all_.step_s
        assert (row.written_bytes, row.stall_s) == (0, 0)
        assert row.memory_bytes - row.peak_bytes == all_.memory_bytes - all_.peak_bytes
    assert f"\na checkpoint per layer is one around each of {SMALL.layers} Block\n" in str(found)
    assert found.predictions[1].written_bytes > 0, "the option is obeyed in ours"


def test_a_rival_of_our_rows_is_what_a_user_would_train() -> None:
    """A checkpoint written into the model has the same figures with everything kept."""

    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Any:
            x = self.stem(x)
            for layer in (*self.encoder["layers"], *self.decoder):  # type: ignore[misc]
                x = checkpoint(layer, x, use_reentrant=False)
            return x.square().mean()

    model, x = Model(), torch.randn(8, 64)
    row = ssd_fx.estimate(model, x, budgets=[1.0], options=TOY).rivals[0]
    options = TOY | {"recompute": False}
    (own,) = ssd_fx.estimate(Checkpointed(), x, budgets=[1.0], options=options, rivals=False).predictions
    assert row.peak_bytes == own.peak_bytes


class Particular(Layer):
    """What a class may do to its `forward` is its own business."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise AttributeError("mine")
        super().__setattr__(name, value)


def test_layers_that_no_checkpoint_can_be_around_are_named() -> None:
    found = ssd_fx.estimate(Model(Particular), torch.randn(8, 64), budgets=[0], options=TOY)
    assert CHECKPOINT not in [row.name for row in found.rivals]
    assert found.rivals, "PyTorch's budget needs no layers"
    assert found.note.startswith("no row of a checkpoint per layer: Particular cannot be traced under one (Attribute")
    assert f"\n{found.note}\n" in str(found)


def test_a_layer_with_a_checkpoint_of_its_own() -> None:
    class Inner(Layer):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return checkpoint(super().forward, x, scale, use_reentrant=False)

    found = ssd_fx.estimate(Model(Inner), torch.randn(8, 64), budgets=[0], options=TOY)
    assert [found.rivals[0].name, found.best and found.best.budget] == [CHECKPOINT, CHECKPOINT]


def test_a_model_without_layers_says_so() -> None:
    found = ssd_fx.estimate(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8), budgets=[0], options=TOY)
    assert "\nno row of a checkpoint per layer: no ModuleList or Sequential of the model has two" in str(found)


def row(budget: Any, peak: int, step_s: float, written: int = 0) -> Prediction:
    return Prediction(budget, peak, peak + 10, step_s, 1.0, 0.0, written)


def table(*rows: Prediction, rivals: tuple[Prediction, ...] = (), memory: int | None = None) -> Estimate:
    return Estimate("ab12", 4, 300, 8, 2, rows, memory=memory, rivals=rivals)


RIVAL = row(CHECKPOINT, 200, 1.2)


def test_a_row_that_another_is_no_worse_than() -> None:
    """A rival may dominate ours, ours a rival, and ours one another; times within 1% are equal."""
    assert RIVAL.dominates(row(0.5, 200, 1.3, 5))
    assert RIVAL.dominates(row(0.5, 210, 1.195, 0))
    assert row(0.5, 200, 1.1).dominates(RIVAL)
    assert not RIVAL.dominates(RIVAL)
    assert not RIVAL.dominates(row(0.5, 190, 1.3, 5)), "it has a lower peak"
    assert not RIVAL.dominates(row(0.5, 210, 1.1, 5)), "it is faster"
    assert not row(0.5, 100, 1.0, 5).dominates(RIVAL), "it writes"


def test_the_marks_of_the_table() -> None:
    found = table(row(0, 100, 1.1, 50), row(0.5, 220, 1.3, 10), row(1.0, 300, 1.0), rivals=(RIVAL,), memory=320)
    assert str(found).splitlines()[2:] == [
        "budget                 peak  all tensors   step  waits  written",
        "0                     100 B        110 B  1.1 s   0 ms     50 B  fits",
        "0.5                   220 B        230 B  1.3 s   0 ms     10 B  fits, worse than checkpoint per layer",
        "1.0                   300 B        310 B    1 s   0 ms      0 B  fastest that fits",
        "checkpoint per layer  200 B        210 B  1.2 s   0 ms      0 B  fits",
        "take budget 1.0: peak 50% higher, step 17% shorter than with a checkpoint per layer; it writes nothing",
    ]
    assert [each["worse_than"] for each in found.details()["predictions"]] == [None, CHECKPOINT, None]
    assert found.details()["rivals"][0] | {"fits": 1} == found.details()["rivals"][0]


def test_no_row_of_the_table_is_better_than_what_is_recommended() -> None:
    """Of random tables, with and without a limit."""
    draw = random.Random(0)

    def drawn(budget: Any, written: int) -> Prediction:
        return row(budget, draw.randint(100, 104), draw.choice((1.0, 1.005, 1.015, 1.1)), written)

    for i in range(2000):
        ours = [drawn(budget, draw.choice((0, 50, 51))) for budget in (0, 0.5, "auto")]
        found = table(*ours, rivals=(drawn(CHECKPOINT, 0),), memory=112 if i % 2 else None)
        assert found.best is None or found.better(found.best) is None, found


def auto(peak: int, step_s: float, written: int = 0) -> Estimate:
    return table(row("auto", peak, step_s, written), rivals=(RIVAL,))


def zero(peak: int, step_s: float, memory: int) -> Estimate:
    return table(row(0, peak, step_s, 50), rivals=(RIVAL,), memory=memory)


@pytest.mark.parametrize(
    ("found", "taken", "said"),
    [
        (
            auto(100, 1.0, 50),
            "auto",
            "peak 50% lower, step 17% shorter than with a checkpoint per layer; it writes 50 B a",
        ),
        (
            auto(200, 1.3, 50),
            CHECKPOINT,
            "take a checkpoint per layer: peak 0% higher, step 8% shorter than with budget auto",
        ),
        (auto(195, 1.15, 50), CHECKPOINT, "peak 3% higher, step 4% longer than with budget auto; it writes nothing"),
        (auto(180, 1.15, 50), "auto", "peak 10% lower"),
        (auto(195, 1.15), "auto", "it writes nothing"),
        (table(row(0, 150, 1.5, 50), row(0.5, 180, 1.0, 20), rivals=(RIVAL,)), 0, "take budget 0: peak 25% lower"),
        (table(row(0, 100, 1.1, 50)), 0, "take budget 0: it writes 50 B a step"),
        (
            zero(100, 1.5, 215),
            CHECKPOINT,
            "take a checkpoint per layer: peak 100% higher, step 20% shorter than with budget 0",
        ),
        (zero(100, 1.18, 215), CHECKPOINT, "take a checkpoint per layer: peak 100% higher"),
        (zero(100, 1.18, 150), 0, "take budget 0: peak 50% lower"),
        (zero(300, 1.0, 100), None, "none fits 100 B: the least is 210 B"),
        (
            table(row("auto", 300, 1.0, 5), rivals=(row(budgeted(0.5), 299, 1.0),)),
            budgeted(0.5),
            "take PyTorch's budget 0.5: peak 0% higher, step 0% longer",
        ),
    ],
)
def test_what_to_take(found: Estimate, taken: Any, said: str) -> None:
    assert (found.best and found.best.budget) == taken
    assert said in found.verdict
    assert str(found).endswith(found.verdict)
    assert found.details()["best"] == taken
    assert replace(found, rivals=()).best in (*found.predictions, None)
