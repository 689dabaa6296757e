"""Forwards whose backward never comes write in vain; the log says so once, and only then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from ssd_fx.runtime.adapt.habits import UNREAD

ROWS = 16
Compiled = Callable[[Tensor], Tensor]


@pytest.fixture
def model(tmp_path: Path) -> Compiled:
    made = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid())
    options = {"inner": "aot_eager", "min_bytes": 0, "dirs": [str(tmp_path)], "allow_tmpfs": True, "engine": "posix"}
    return torch.compile(made, backend=ssd_fx.backend, options=options)


def evaluate(model: Compiled, forwards: int) -> None:
    for _ in range(forwards):
        model(torch.randn(ROWS, 64))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    ssd_fx.runtime.entries.living()  # deals with deaths that are not dealt with yet
    return [record.message for record in caplog.records if "whose backward never came" in record.message]


def test_an_evaluation_without_no_grad(model: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    evaluate(model, UNREAD - 1)
    assert said(caplog) == []
    evaluate(model, 2 * UNREAD)
    (message,) = said(caplog)
    assert f"has run {UNREAD} forwards in a row whose backward never came" in message
    assert "evaluate under torch.no_grad(), which stores nothing" in message


def test_resetting_the_counters_hides_nothing(model: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(UNREAD + 1):
        evaluate(model, 1)
        ssd_fx.reset_stats()
    assert len(said(caplog)) == 1


def accumulate(model: Compiled) -> None:
    for _ in range(3 * UNREAD):
        model(torch.randn(ROWS, 64)).sum().backward()


def one_look_in_between(model: Compiled) -> None:
    for _ in range(UNREAD):
        evaluate(model, 1)
        model(torch.randn(ROWS, 64)).sum().backward()


def a_pipeline(model: Compiled) -> None:
    """All forwards before the first backward."""
    losses = [model(torch.randn(ROWS, 64)).sum() for _ in range(3 * UNREAD)]
    while losses:
        losses.pop(0).backward()


def no_grad(model: Compiled) -> None:
    model(torch.randn(ROWS, 64)).sum().backward()
    with torch.no_grad():
        evaluate(model, 3 * UNREAD)


def failures(model: Compiled) -> None:
    """Fewer than it takes."""
    for _ in range(UNREAD - 1):
        with contextlib.suppress(ZeroDivisionError):
            loss = model(torch.randn(ROWS, 64)).sum()
            raise ZeroDivisionError(loss)


@pytest.mark.parametrize("loop", [accumulate, one_look_in_between, a_pipeline, no_grad, failures])
def test_loops_that_are_right(
    loop: Callable[[Compiled], None], model: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    loop(model)
    assert said(caplog) == []
    assert ssd_fx.stats().stores > 0


def test_what_stays_in_memory_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"inner": "aot_eager", "min_bytes": 0, "dirs": [str(tmp_path)], "allow_tmpfs": True, "budget": "1GiB"}
    evaluate(torch.compile(nn.Linear(64, 64), backend=ssd_fx.backend, options=options), 2 * UNREAD)
    assert said(caplog) == []
