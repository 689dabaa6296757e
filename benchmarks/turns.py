"""Processes that take turns: each steps while the others wait, or all compile at once and measure one by one."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path


def hold_memory() -> None:
    """Have ssd_fx give no memory back while this process waits for its turn, as it gives none back between two steps.

    Else its next steps would take longer, as they would touch all of it anew.
    """
    from ssd_fx.runtime.deaths import when_idle  # not for processes that train without it
    from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

    when_idle.remove(CPU_ALLOCATOR.tick)


class Turn:
    """Of processes that name one file: none measures while another compiles or measures. It lasts until this one ends.

    The file is locked: shared to compile, exclusively to measure. So a process that is killed stops no other.
    """

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a")  # noqa: SIM115, it is open while this process lives

    def compile(self, patience_s: float) -> bool:
        """Whether nobody measured any more within that time. From then on nobody measures before this one does."""
        return self._locked(fcntl.LOCK_SH, patience_s)

    def measure(self, patience_s: float) -> bool:
        """Whether the turn came within that time. If not, this process must not measure."""
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return self._locked(fcntl.LOCK_EX, patience_s)

    def _locked(self, how: int, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._file, how | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.1)
