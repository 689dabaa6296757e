"""`pytest.mark.alone`: while such a test runs, no other worker of pytest-xdist runs one."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(directory: Path, *, alone: bool) -> Iterator[None]:
    """A test's turn among the workers that share `directory`: beside others, or `alone`.

    Who waits to be alone holds the gate, which everybody passes. So no test of another worker begins meanwhile.
    """
    with open(directory / "gate", "w") as gate, open(directory / "running", "w") as running:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
