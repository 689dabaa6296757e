"""Prefetches across graphs: when a backward has asked for its last tensor, those of the next backward are read.

Which backward that is, and in which order it asks, is learned in `adapt/runs.py`. Within a run, slots that were late in
earlier steps are read early. While there is memory to spare, all slots of the run are.

All methods run under `entries.GUARD.lock`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ssd_fx.runtime.adapt.runs import Run, Runs
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.reader import Reader
from ssd_fx.runtime.states import Entry, Ledger, State

_log = logging.getLogger("ssd_fx")


class Prefetcher:
    """Prefetches up to `window` bytes, and `spare()` bytes more.

    `budget`: the most bytes that may be in memory for later backwards, resident or read ahead; 0 for no such limit.
    """

    def __init__(
        self, reader: Reader, ledger: Ledger, runs: Runs, window: int, spare: Callable[[], int], budget: int
    ) -> None:
        self._budget = budget
        self._reader = reader
        self._ledger = ledger
        self._runs = runs
        self._window = window
        self._spare = spare
        self._upcoming: deque[Entry] = deque()  # to be read when the window has room
        self._read_ahead: Run | None = None  # the run that is read ahead as a whole

    def asked(self, entry: Entry) -> None:
        """The backward asked for an entry: prefetches what comes next."""
        run = self._runs.asked(entry)
        if run is None:
            return
        if not run.waiting:
            self._upcoming = deque(self._runs.behind(run))
        elif self._runs.knows(run.graph) and self._spare():
            if self._read_ahead is not run:
                self._read_ahead = run
                self._upcoming = deque(self._runs.rest(run))
        else:
            self._upcoming.extend(self._runs.late(run, entry.slot))
        self.advance()

    def advance(self) -> None:
        """Starts the prefetches that the window has room for."""
        while self._upcoming:
            entry = self._upcoming[0]
            if _worth_reading(entry):
                if not self._has_room(entry):
                    return
                try:
                    self._reader.ahead(entry)
                except (OSError, RuntimeError, MemoryError) as error:  # the graph's own load raises it again
                    _log.warning("reading %s ahead failed: %s", entry.name, error)
                    self._upcoming.clear()
                    return
            self._upcoming.popleft()

    def _has_room(self, entry: Entry) -> bool:
        """Whether the window and the budget have room. An entry that is larger than the window is read alone."""
        waits = self._ledger.resident_bytes + self._ledger.ahead_bytes
        if self._budget and waits + entry.nbytes > self._budget:
            return False
        reading = self._ledger.reading_bytes
        if self._window and not reading:
            return True
        return reading + entry.moved_bytes <= self._window + self._spare()


def _worth_reading(entry: Entry) -> bool:
    """Whether the entry was not asked for yet, is on the disk, and is of the stream on which this thread computes.

    Autograd runs a backward on its forward's stream. What was read into memory of another stream would be dropped.
    """
    waits = entry.run is not None and entry.run.waits_for(entry)
    on_disk = entry.state is State.ON_DISK and not entry.ahead
    return waits and on_disk and entry.stream == streams.current(entry.device)
