"""Reads across graphs: when a backward has asked for the last of its tensors, the next one's are read ahead.

A *run* is one forward of one graph with what it stored. Which run comes next is first taken to be the latest one that
waits (backwards come in reverse order); once a step has been seen, it is the one that came then: runs are numbered in
the order in which a step begins them, which also covers pipelines and gradient accumulation. Within a graph, slots
are read in the order of its last backward. All methods run under the lock of `entries`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ssd_fx.runtime.entries import Entry, State
from ssd_fx.runtime.habits import Habits
from ssd_fx.runtime.reader import Reader

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
        self._slots: dict[str, list[int]] = {}  # the last backward of each graph
        self._upcoming: deque[Entry] = deque()

    def begin(self, graph: str) -> None:
        """A forward of `graph` begins."""
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
            self._slots[run.graph] = run.asked
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
                if self._reader.outstanding_bytes + entry.moved_bytes > self._window:
                    return
                self._reader.ahead(entry)
            self._upcoming.popleft()

    def _leave(self, run: Run, entry: Entry) -> None:
        del run.waiting[entry.slot]
        if run.waiting:
            return
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
        slots = self._slots.get(run.graph) or list(reversed(run.waiting))
        return [run.waiting[slot] for slot in slots if slot in run.waiting]

    def _late_ones(self, run: Run, slot: int) -> list[Entry]:
        """Those that follow soon and had to be waited for in the last steps."""
        order = self._slots.get(run.graph, [])
        if slot not in order:
            return []
        following = order[order.index(slot) + 1 :][:FAR]
        return [run.waiting[s] for s in following if s in run.waiting and self._habits.early(run.graph, s)]


def _worth_reading(entry: Entry) -> bool:
    """Whether it still waits, and lies on the disk."""
    waits = entry.run is not None and entry.run.waiting.get(entry.slot) is entry
    return waits and entry.state is State.ON_DISK and entry.nbytes > 0 and not entry.ahead
