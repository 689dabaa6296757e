"""The operators as functions: the kernels themselves, or the operators where somebody watches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ssd_fx.passes.lowering.inductor import LOWERINGS
from ssd_fx.runtime import calls
from ssd_fx.runtime.ops import KERNELS

SIZE = [2, 3], torch.float32, torch.device("cpu")


class Watching:
    """Of a mode: notes what it sees, and calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def watch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatched(Watching, TorchDispatchMode):
    __torch_dispatch__ = Watching.watch


class Functions(Watching, TorchFunctionMode):
    __torch_function__ = Watching.watch


def test_each_operator_that_is_lowered_is_a_function() -> None:
    assert {name for name in vars(calls) if name in KERNELS} == set(KERNELS)
    assert {operator._schema.name.removeprefix("ssd_fx::") for operator in LOWERINGS} == set(KERNELS)


@pytest.mark.parametrize("mode", [Dispatched, Functions])
def test_a_mode_sees_the_operator_alone(mode: Any) -> None:
    with mode() as watching:
        handle = calls.stand_in(*SIZE)
        calls.refuse_stand_ins([])
    assert watching.seen == ["ssd_fx.stand_in.default", "ssd_fx.refuse_stand_ins.default"]
    assert (handle.shape, handle.stride()) == ((2, 3), (0, 0))


def test_the_profiler_sees_it() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        calls.stand_in(*SIZE)
    assert "ssd_fx::stand_in" in {event.name for event in seen.events()}
