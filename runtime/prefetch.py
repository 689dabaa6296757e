"""Reads across graphs: when a backward has asked for the last of its tensors, the next one's are read ahead.

A *run* is one forward of one graph with what it stored. Which run comes next is first taken to be the latest one that
waits (backwards come in reverse order); once a step has been seen, it is the one that came then: runs are numbered in
the order in which a step begins them, which also covers pipelines and gradient accumulation. Within a graph, slots
are read in the order of its last backward. All methods run under the lock of `entries`.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from ssd_fx.runtime.entries import Entry, State
from ssd_fx.runtime.habits import Habits
from ssd_fx.runtime.reader import Reader

_log = logging.getLogger("ssd_fx")

OLD = 4096  # runs: 64 micro-batches through 48 blocks may all wait at a time
FAR = 2  # a slot that stalled is looked for among so many that follow


@dataclass(eq=False, slots=True)
class Run:
    """One forward of `graph`, the `number`-th of its step. `waiting`: by slot, what was not asked for yet."""

    graph: str
    number: int
    waiting: dict[int, Entry] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)


class Prefetcher:
    """Follows the runs, and begins reads within `window` bytes that are read and not waited for."""

    def __init__(self, reader: Reader, habits: Habits, window: int) -> None:
        self._reader, self._habits, self._window = reader, habits, window
        self._current: dict[str, Run] = {}
        self._runs: dict[int, Run] = {}  # of this step, those with something waiting, by number
        self._begun = 0
        self._order: list[tuple[int, str]] = []  # in which the runs of this step were asked for
        self._last_order: dict[tuple[int, str], tuple[int, str]] = {}  # of the last step: the successors
        self._slots: dict[str, dict[int, int]] = {}  # the last backward of each graph: slots and their places
        self._upcoming: deque[Entry] = deque()

    def begin(self, graph: str) -> None:
        """A forward of `graph` begins."""
        self._forget_old()
        self._current[graph] = Run(graph, self._begun)
        self._begun += 1

    def stored(self, entry: Entry) -> None:
        """An entry of the graph's latest run was stored."""
        run = self._current.get(entry.graph)
        if run is None:
            return
        entry.run = run
        run.waiting[entry.slot] = entry
        self._runs[run.number] = run

    def asked(self, entry: Entry) -> None:
        """The backward asked for an entry: reads what comes next if there is room."""
        run = entry.run
        if run is None or run.waiting.get(entry.slot) is not entry:
            return
        if not run.asked:
            self._order.append((run.number, run.graph))
        run.asked.append(entry.slot)
        self._leave(run, entry)
        if run.waiting:
            self._upcoming.extend(self._late_ones(run, entry.slot))
        else:
            self._slots[run.graph] = {slot: place for place, slot in enumerate(run.asked)}
            successor = self._successor(run)
            self._upcoming = deque(self._in_order(successor) if successor else ())
        self.advance()

    def dead(self, entry: Entry) -> None:
        """The entry dies."""
        run, entry.run = entry.run, None
        if run is not None and run.waiting.get(entry.slot) is entry:
            self._leave(run, entry)

    def advance(self) -> None:
        """Begins the reads that there is room for."""
        while self._upcoming:
            entry = self._upcoming[0]
            if _worth_reading(entry):
                outstanding = self._reader.outstanding_bytes  # one always may, however large
                if outstanding + entry.moved_bytes > self._window and (outstanding or not self._window):
                    return
                try:
                    self._reader.ahead(entry)
                except (OSError, MemoryError) as error:  # nobody asked for it: who does will hear of it
                    _log.warning("reading %s ahead failed: %s", entry.name, error)
                    self._upcoming.clear()
                    return
            self._upcoming.popleft()

    def _forget_old(self) -> None:
        """A run whose backward has not come while many others went by may never come: it no longer holds up a step."""
        oldest = next(iter(self._runs.values()), None)
        if oldest and oldest.number < self._begun - max(OLD, 2 * len(self._last_order)):
            for entry in oldest.waiting.values():
                entry.run = None
                self._reader.drop_ahead(entry)
            oldest.waiting.clear()
            self._end(oldest)

    def _leave(self, run: Run, entry: Entry) -> None:
        del run.waiting[entry.slot]
        if not run.waiting:
            self._end(run)

    def _end(self, run: Run) -> None:
        self._runs.pop(run.number, None)
        if not self._runs:  # the step is over
            self._last_order = dict(zip(self._order, self._order[1:], strict=False))
            self._order, self._begun = [], 0

    def _successor(self, run: Run) -> Run | None:
        known = self._last_order.get((run.number, run.graph))
        if known and known[0] in self._runs and self._runs[known[0]].graph == known[1]:
            return self._runs[known[0]]
        return next((r for _, r in sorted(self._runs.items(), reverse=True) if not r.asked), None)

    def _in_order(self, run: Run) -> list[Entry]:
        slots = self._slots.get(run.graph) or reversed(run.waiting)
        return [run.waiting[slot] for slot in list(slots) if slot in run.waiting]

    def _late_ones(self, run: Run, slot: int) -> list[Entry]:
        """Those that follow soon and had to be waited for in the last steps."""
        if not self._habits.late:
            return []
        places = self._slots.get(run.graph, {})
        near = range(places.get(slot, len(places)) + 1, places.get(slot, len(places)) + 1 + FAR)
        late = [s for g, s in self._habits.late if g == run.graph and places.get(s) in near and s in run.waiting]
        return [run.waiting[s] for s in sorted(late, key=places.__getitem__)]


def _worth_reading(entry: Entry) -> bool:
    """Whether it still waits, and lies on the disk."""
    waits = entry.run is not None and entry.run.waiting.get(entry.slot) is entry
    return waits and entry.state is State.ON_DISK and entry.nbytes > 0 and not entry.ahead
