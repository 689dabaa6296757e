"""A drive that is slow at random, under any tests: `make slow-drive`, or `pytest -p tests.faults.slow_drive` with the
library of faultio.c preloaded.

What must hold for every order of events then meets orders that a fast drive never shows: writes that are still under
way at their release, loads from memory, deaths of what is being written.
"""

from __future__ import annotations

import tempfile

import pytest

from tests.faults.faultio import Action, Call, Faults

RATE = 0.25  # of the calls, for each of the pauses
PAUSES_MS = (3, 10, 30)


def pytest_configure(config: pytest.Config) -> None:
    """In each process that runs tests, and not in the one that hands them out: its children need the preload."""
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return
    faults = Faults(tempfile.gettempdir())
    for call in (Call.WRITE, Call.READ):
        for milliseconds in PAUSES_MS:
            faults.some(call, Action.SLEEP, RATE, milliseconds, milliseconds)
