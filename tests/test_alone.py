"""Tests that other workers must not disturb."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.alone import turn

SHORT_S = 0.2


def begin(directory: Path, alone: bool) -> tuple[threading.Event, threading.Event, threading.Thread]:
    """(its turn has come, it may end, the thread) of a test of another worker."""
    came, ends = threading.Event(), threading.Event()

    def run() -> None:
        with turn(directory, alone=alone):
            came.set()
            assert ends.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    return came, ends, thread


@pytest.mark.parametrize(
    ("first", "second", "together"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_who_runs_beside_whom(tmp_path: Path, first: bool, second: bool, together: bool) -> None:
    came, ends, thread = begin(tmp_path, first)
    assert came.wait(20)
    later, last, other = begin(tmp_path, second)
    assert later.wait(20 if together else SHORT_S) is together
    ends.set()
    assert later.wait(20)
    last.set()
    thread.join()
    other.join()


def test_no_test_begins_while_one_waits_to_be_alone(tmp_path: Path) -> None:
    came, ends, thread = begin(tmp_path, False)
    assert came.wait(20)
    alone, last, waiting = begin(tmp_path, True)
    assert not alone.wait(SHORT_S)
    later, end, other = begin(tmp_path, False)
    assert not later.wait(SHORT_S)
    ends.set()
    assert alone.wait(20)
    assert not later.wait(SHORT_S)
    last.set()
    assert later.wait(20)
    end.set()
    for each in (thread, waiting, other):
        each.join()
