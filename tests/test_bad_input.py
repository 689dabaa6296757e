"""A mistake is named at compile time, as the type that it is, through `torch.compile` too."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.exc import ShortenTraceback

import ssd_fx
from ssd_fx.passes import pipeline
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.passes.user_errors import user_errors
from ssd_fx.runtime.native import loader


def compile_with(mode: str | None = None, **options: object) -> None:
    torch._dynamo.reset()
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda t: t.sin().sum(), backend=_Backend(mode), options=options)(x)


class _Backend:
    """`ssd_fx.backend` with a mode: torch.compile takes mode or options, backends get both."""

    __name__ = "ssd_fx"

    def __init__(self, mode: str | None) -> None:
        self.mode = mode

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: object) -> object:
        return ssd_fx.backend(gm, inputs, mode=self.mode, **kwargs)  # type: ignore[arg-type]


def test_python_collects_as_before_behind_a_compilation_that_fails() -> None:
    """While a graph is partitioned it rarely looks through all objects."""
    before, within = gc.get_threshold(), []

    def fails(*_: object) -> None:
        within.append(gc.get_threshold())
        raise BudgetError(1, 2)

    with mock.patch.object(pipeline, "decide_joint", fails), pytest.raises(ValueError, match="cannot be met"):
        compile_with(inner="aot_eager")
    assert within == [(*before[:2], 30 * before[2])]
    assert gc.get_threshold() == before


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_budget_in_bytes_that_cannot_be_met(inner: str) -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        return ssd_fx.keep(t @ t).sin().sum()

    said = {"budget": "4095B", "inner": inner, "engine": "memory", "min_bytes": 0}
    expected = (
        r"^a budget of 4095 B cannot be met; the least that can is 4096 B, because these must stay in memory in graph "
        r"[0-9a-f]{8}: 'mm' \(4096 B, marked by ssd_fx\.keep\); right would be a larger budget, fewer marks or a "
        r"smaller min_bytes$"
    )
    x = torch.randn(32, 32, requires_grad=True)
    with pytest.raises(ValueError, match=expected):
        torch.compile(function, backend=ssd_fx.backend, options=said)(x)
    torch._dynamo.reset()
    torch.compile(function, backend=ssd_fx.backend, options=said | {"budget": "4096B"})(x).backward()


def test_no_pool_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a built pool nor a compiler: an error when the model is compiled. Engine `"memory"` needs no pool."""
    monkeypatch.setattr(loader, "_packaged", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    loader.library.cache_clear()
    here = {"dirs": [str(tmp_path)], "inner": "aot_eager"}
    try:
        for engine in ("auto", "posix"):
            with pytest.raises(ValueError, match=r"no native pool.*directory: 'cc'.*or a wheel of ssd_fx"):
                compile_with(engine=engine, **here)
        compile_with(engine="memory", **here)
    finally:
        loader.library.cache_clear()


def test_mode_for_aot_eager() -> None:
    with pytest.raises(ValueError, match="mode='max-autotune' is Inductor's; inner='aot_eager' takes none"):
        compile_with("max-autotune", inner="aot_eager")


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode='faster' is none of Inductor's"):
        compile_with("faster")


def _json_error() -> Exception:
    """Its `__init__` takes other arguments than its `args`."""
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    return caught.value


NO_TEXT = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    "error",
    [ValueError("plain", 3), OSError("no number"), FileNotFoundError(2, "not there", "file"), _json_error(), NO_TEXT],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_the_user_as_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, user_errors():
        raise error
    assert isinstance(caught.value, ShortenTraceback)
    assert (str(caught.value), caught.value.args) == (str(error), error.args)
    for name in ("errno", "filename", "pos"):
        assert getattr(caught.value, name, None) == getattr(error, name, None)
