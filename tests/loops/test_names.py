"""What is around a compiled model is as without us: its name as a backend, checkpoints, pickles and copies."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from tests.bitwise import Compile, assert_same_bits
from tests.loops.loops import (
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    gradients,
    parameters,
    run,
)


def steps(compiled: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        backward(compiled(batch(seed)))
        optimizer.step()
        optimizer.zero_grad()


def test_it_is_in_the_list_of_backends() -> None:
    assert "ssd_fx" in torch._dynamo.list_backends()


def in_place(compile: Compile) -> list[Tensor]:
    """`Module.compile` passes its arguments on to torch.compile, and leaves the module what it is."""
    model = Net()
    model.compile(**compile.keywords)  # type: ignore[attr-defined]
    assert type(model) is Net
    backward(model(batch(0)))
    return gradients(model)


def test_a_module_that_is_compiled_in_place(tmp_path: Path) -> None:
    assert_all_read_back(assert_no_bit_changes(in_place, tmp_path))


def test_checkpoints_are_those_of_inductor(tmp_path: Path) -> None:
    """The same names, the model's own below `_orig_mod.`, as every compiled module has them, and the same bytes."""
    model = Net()
    ours = torch.compile(model, backend="ssd_fx", options={"dirs": [str(tmp_path)], "min_bytes": 0})
    stock = torch.compile(model, backend="inductor")
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert [name.removeprefix("_orig_mod.") for name in ours.state_dict()] == list(model.state_dict())
    for a, b in zip(ours.state_dict().values(), model.state_dict().values(), strict=True):
        assert a.data_ptr() == b.data_ptr()


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Saved after two steps, loaded into a fresh model that nobody compiled: four steps are those of one run."""

    def straight(compile: Compile) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(compile(model), model, optimizer, range(4))
        return parameters(model)

    def interrupted(compile: Compile) -> list[Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(compile(model), model, optimizer, range(2))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        again = Net()
        again.load_state_dict(loaded["model"])
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        optimizer.load_state_dict(loaded["optimizer"])
        steps(compile(again), again, optimizer, range(2, 4))
        return parameters(again)

    expected = run(straight, tmp_path)
    assert_same_bits(run(interrupted, tmp_path), expected)
    assert_all_read_back(ssd_fx.stats())
    assert ssd_fx.stats().written_bytes >= 0.9 * ssd_fx.stats().saved_bytes


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, pytest.param(saved, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_copies_of_a_model_that_has_trained(tmp_path: Path, duplicate: Any, how: str) -> None:
    """With a step in flight; the copy trains on as the model does, and its tensors are its own."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(blocks=1)
        if how == "torch.compile":
            compiled = compile(model)
        else:
            model.compile(**compile.keywords)  # type: ignore[attr-defined]
            compiled = model
        loss = compiled(batch(0))
        twin = duplicate(model)
        backward(loss)
        assert all(p.grad is None for p in twin.parameters())
        first = gradients(model)
        torch.manual_seed(7)
        backward(compile(twin)(batch(1)))
        model.zero_grad()
        torch.manual_seed(7)
        backward(compiled(batch(1)))
        assert_same_bits(gradients(twin), gradients(model))
        return [*first, *gradients(twin)]

    stats = assert_no_bit_changes(loop, tmp_path)
    assert_all_read_back(stats)
