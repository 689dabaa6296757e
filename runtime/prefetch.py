"""Prefetches across graphs: when a backward has asked for its last tensor, those of the next backward are read.

A *run* is one forward of one graph, with what it stored. In the first step the next run is taken to be the latest one
whose backward has not begun, because backwards come in reverse order. Later it is the one that came next in the step
before. Runs are numbered in the order in which a step begins them, so this covers pipelines and gradient accumulation
too. Within a graph, slots are read in the order of its last backward.

Within a run, slots that were late in earlier steps are read early. While there is memory to spare, all of the run is.

All methods run under `entries.GUARD.lock`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.habits import Habits
from ssd_fx.runtime.reader import Reader
from ssd_fx.runtime.states import Entry, Ledger, State

_log = logging.getLogger("ssd_fx")

OLD = 4096  # runs: 64 micro-batches through 48 blocks may all wait for their backwards at a time
FAR = 2  # a late slot is read early if it is among this many that follow in the last backward's order

_Key = tuple[int, str]
"""A run in any step: its number and its graph."""


@dataclass(eq=False, slots=True)
class Run:
    """The `number`-th forward of its step. `waiting`: the entries not asked for yet, by slot. `asked`: the slots that
    were, in order."""

    graph: str
    number: int
    waiting: dict[int, Entry] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    @property
    def key(self) -> _Key:
        return self.number, self.graph

    def waits_for(self, entry: Entry) -> bool:
        """Whether `entry` is in this run and was not asked for yet."""
        return self.waiting.get(entry.slot) is entry


class Prefetcher:
    """Follows the runs, and prefetches up to `window` bytes, and `spare()` bytes more."""

    def __init__(self, reader: Reader, ledger: Ledger, habits: Habits, window: int, spare: Callable[[], int]) -> None:
        self._reader = reader
        self._ledger = ledger
        self._habits = habits
        self._window = window
        self._spare = spare
        self._current: dict[str, Run] = {}  # the latest run of each graph
        self._runs: dict[int, Run] = {}  # the runs of this step that have something waiting, by number
        self._begun = 0  # runs of this step
        self._order: list[_Key] = []  # the runs of this step, as their backwards came
        self._next: dict[_Key, _Key] = {}  # the run that followed each one in the last step
        self._slots: dict[str, dict[int, int]] = {}  # the place of each slot in the last backward of each graph
        self._upcoming: deque[Entry] = deque()  # to be read when the window has room
        self._read_ahead: Run | None = None  # the run that is read ahead as a whole

    def begin(self, graph: str) -> None:
        """Records that a forward of `graph` begins."""
        self._forget_old()
        self._current[graph] = Run(graph, self._begun)
        self._begun += 1

    def stored(self, entry: Entry) -> None:
        """Records that an entry of the graph's latest run was stored."""
        run = self._current.get(entry.graph)
        if run is None:
            return
        entry.run = run
        run.waiting[entry.slot] = entry
        self._runs[run.number] = run

    def asked(self, entry: Entry) -> None:
        """Records that the backward asked for an entry, and prefetches what comes next."""
        run = entry.run
        if run is None or not run.waits_for(entry):
            return
        self._note_asked(run, entry)
        if not run.waiting:
            self._plan_successor(run)
        elif self._spare() and run.graph in self._slots:
            self._plan_rest(run)
        else:
            self._upcoming.extend(self._late_ones(run, entry.slot))
        self.advance()

    def _note_asked(self, run: Run, entry: Entry) -> None:
        if not run.asked:
            self._order.append(run.key)
        run.asked.append(entry.slot)
        self._remove(run, entry)

    def _plan_successor(self, run: Run) -> None:
        """The backward of `run` has asked for all: what the next one needs is read."""
        self._slots[run.graph] = {slot: place for place, slot in enumerate(run.asked)}
        successor = self._successor(run)
        self._upcoming = deque(self._in_order(successor) if successor else ())

    def _plan_rest(self, run: Run) -> None:
        """There is memory to spare: all that the backward of `run` still needs is read."""
        if self._read_ahead is not run:
            self._read_ahead = run
            self._upcoming = deque(self._in_order(run))

    def dead(self, entry: Entry) -> None:
        """Records that an entry dies. Called again if a signal ended it early."""
        run = entry.run
        if run is not None and run.waits_for(entry):
            self._remove(run, entry)
        entry.run = None

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
        """Whether the window has room for an entry. An entry larger than the window is read alone."""
        reading = self._ledger.reading_bytes
        if self._window and not reading:
            return True
        return reading + entry.moved_bytes <= self._window + self._spare()

    def _forget_old(self) -> None:
        """Forgets the oldest run if very many began after it: a step ends only when nothing waits.

        A caller may keep the graph of such a run for ever.
        """
        oldest = next(iter(self._runs.values()), None)
        if oldest and oldest.number < self._begun - max(OLD, 2 * len(self._next)):
            for entry in oldest.waiting.values():
                entry.run = None
                self._reader.drop_ahead(entry)
            oldest.waiting.clear()
            self._end(oldest)

    def _remove(self, run: Run, entry: Entry) -> None:
        if len(run.waiting) == 1:
            self._end(run)  # first, so that it is done again if a signal ends it early
        del run.waiting[entry.slot]

    def _end(self, run: Run) -> None:
        self._runs.pop(run.number, None)
        if not self._runs:  # the step is over
            self._next = dict(zip(self._order, self._order[1:], strict=False))
            self._order = []
            self._begun = 0

    def _successor(self, run: Run) -> Run | None:
        """The run whose backward is expected after that of `run`."""
        known = self._next.get(run.key)
        if known:
            found = self._runs.get(known[0])
            if found and found.key == known:
                return found
        for number in sorted(self._runs, reverse=True):
            if not self._runs[number].asked:
                return self._runs[number]
        return None

    def _in_order(self, run: Run) -> list[Entry]:
        slots = list(self._slots.get(run.graph) or reversed(run.waiting))
        return [run.waiting[slot] for slot in slots if slot in run.waiting]

    def _late_ones(self, run: Run, slot: int) -> list[Entry]:
        """The entries that follow `slot` soon, and that the graph had to wait for in the last steps."""
        if not self._habits.late:
            return []
        places = self._slots.get(run.graph, {})
        first = places.get(slot, len(places)) + 1
        near = range(first, first + FAR)
        late = [s for g, s in self._habits.late if g == run.graph and places.get(s) in near and s in run.waiting]
        return [run.waiting[s] for s in sorted(late, key=places.__getitem__)]


def _worth_reading(entry: Entry) -> bool:
    """Whether the entry was not asked for yet, is on the disk, and is of the stream on which this thread computes.

    Autograd runs a backward on its forward's stream. What was read into memory of another stream would be dropped.
    """
    waits = entry.run is not None and entry.run.waits_for(entry)
    on_disk = entry.state is State.ON_DISK and not entry.ahead
    return waits and on_disk and entry.stream == streams.current(entry.device)
