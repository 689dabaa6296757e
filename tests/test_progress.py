"""What takes long is announced, on a terminal too; what does not is not."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx import progress


def test_work_that_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssd_fx"), progress.announced("measuring", 0.05):
        time.sleep(0.2)
    assert caplog.messages[0] == "measuring ..."
    assert caplog.messages[1].startswith("measuring: 0.")


def test_work_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    within = progress.announced("measuring", 0.05)
    with caplog.at_level(logging.INFO, "ssd_fx"), pytest.raises(ZeroDivisionError), within:
        _ = 1 / 0
    time.sleep(0.1)
    assert caplog.messages == []


@pytest.mark.parametrize(("terminal", "lines"), [(True, 2), (False, 0)])
def test_on_a_terminal_alone(
    terminal: bool, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with progress.announced("measuring", 0.02):
        time.sleep(0.1)
    assert capsys.readouterr().err.count("ssd_fx: measuring") == lines


class Tee:
    """A stream of the program's own: it has no isatty, and is no file."""

    def write(self, text: str) -> None:
        raise AssertionError("it is no terminal")


class Gone:
    """A terminal that was closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("stream", [Tee(), None, Gone()], ids=["without isatty", "none", "closed"])
def test_a_standard_error_that_takes_nothing_fails_no_work(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.announced("measuring", 0.0):
        pass


def test_planning_and_the_first_file_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "planning", partial(progress.announced, progress.planning.args[0], 0.0))
    options = {"inner": "aot_eager", "dirs": [str(tmp_path)], "min_bytes": 0, "allow_tmpfs": True, "engine": "posix"}
    with caplog.at_level(logging.INFO, "ssd_fx"):
        compiled = torch.compile(torch.nn.Linear(8, 8), backend=ssd_fx.backend, options=options)
        compiled(torch.randn(4, 8)).sum().backward()
        compiled(torch.randn(4, 8)).sum().backward()
    assert any(message.startswith("planning what goes to the drive") for message in caplog.messages)
    assert [str(tmp_path) in message for message in caplog.messages if "a new file in" in message] == [True]
