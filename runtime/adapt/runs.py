"""In which order backwards come, and in which order they ask for their tensors.

A *run* is one forward of one graph, with what it stored. In the first step the next run is taken to be the latest one
whose backward has not begun, because backwards come in reverse order. Later it is the run that came next in the step
before. Runs are numbered in the order in which a step begins them, so this covers pipelines and gradient accumulation
too. Here a step ends when no run waits any more, because in a pipeline forwards and backwards alternate. Within a
graph, slots are expected to be asked for in the order of its last backward.

All methods run under `entries.GUARD.lock`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

from ssd_fx.runtime.adapt.habits import Habits
from ssd_fx.runtime.states import Entry

OLD = 4096  # runs: 64 micro-batches through 48 blocks may all wait for their backwards at a time
FAR = 2  # a late slot is read up to this many loads before its own; the planner reckons with it (`LOADS_AHEAD`)

_Key = tuple[int, str]
"""A run in any step: its number and its graph."""


@dataclass(eq=False, slots=True)
class Run:
    """The `number`-th forward of its step. `waiting`: the entries not asked for yet, by slot. `asked`: the slots that
    were, in order. `going`: (`seq`, id, entry): the backward needs the entry's memory from its node `seq` on."""

    graph: str
    number: int
    waiting: dict[int, Entry] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    going: list[tuple[int, int, Entry]] = field(default_factory=list)  # a heap

    @property
    def key(self) -> _Key:
        return self.number, self.graph

    def waits_for(self, entry: Entry) -> bool:
        """Whether `entry` is in this run and was not asked for yet."""
        return self.waiting.get(entry.slot) is entry


class Runs:
    """The runs of this step, and what the last one has taught."""

    def __init__(self, habits: Habits) -> None:
        self._habits = habits
        self._current: dict[str, Run] = {}  # the latest run of each graph
        self._runs: dict[int, Run] = {}  # the runs of this step that have something waiting, by number
        self._begun = 0  # runs of this step
        self._order = deque[_Key](maxlen=OLD)  # the runs of this step, as their backwards came; a step may never end
        self._next: dict[_Key, _Key] = {}  # the run that followed each one in the last step
        self._slots: dict[str, dict[int, int]] = {}  # the place of each slot in the last backward of each graph

    def begin(self, graph: str) -> list[Entry]:
        """Records that a forward of `graph` begins. Returns the entries that no backward is expected to ask for."""
        forgotten = self._forget_old()
        self._current[graph] = Run(graph, self._begun)
        self._begun += 1
        return forgotten

    def stored(self, entry: Entry) -> None:
        """Records that an entry of the graph's latest run was stored."""
        run = self._current.get(entry.graph)
        if run is None:
            return
        entry.run = run
        run.waiting[entry.slot] = entry
        self._runs[run.number] = run

    def asked(self, entry: Entry) -> Run | None:
        """Records that the backward asked for an entry. Returns its run, None if it was of none or asked for before."""
        run = entry.run
        if run is None or not run.waits_for(entry):
            return None
        if not run.asked:
            self._order.append(run.key)
        run.asked.append(entry.slot)
        self._remove(run, entry)
        if not run.waiting:
            self._slots[run.graph] = {slot: place for place, slot in enumerate(run.asked)}
        return run

    def dead(self, entry: Entry) -> None:
        """Records that an entry dies. Called again if a signal ended the call early."""
        run = entry.run
        if run is not None and run.waits_for(entry):
            self._remove(run, entry)
        entry.run = None

    def knows(self, graph: str) -> bool:
        """Whether a backward of `graph` has come to its end."""
        return graph in self._slots

    def rest(self, run: Run) -> list[Entry]:
        """The entries that a run still waits for, in the order in which they are expected to be asked for."""
        slots = list(self._slots.get(run.graph) or reversed(run.waiting))
        return [run.waiting[slot] for slot in slots if slot in run.waiting]

    def behind(self, run: Run) -> list[Entry]:
        """The entries that the next backward asks for, once the backward of `run` has asked for all of its own."""
        successor = self._successor(run)
        return self.rest(successor) if successor else []

    def late(self, run: Run, slot: int) -> list[Entry]:
        """The entries that follow `slot` soon, and that the graph had to wait for in the last steps."""
        if not self._habits.late:
            return []
        places = self._slots.get(run.graph, {})
        first = places.get(slot, len(places)) + 1
        near = range(first, first + FAR)
        late = [s for g, s in self._habits.late if g == run.graph and places.get(s) in near and s in run.waiting]
        return [run.waiting[s] for s in sorted(late, key=places.__getitem__)]

    def _forget_old(self) -> list[Entry]:
        """Forgets the oldest run if very many began after it, and returns its entries.

        A caller may keep its graph for ever, and a step ends only when no run waits.
        """
        oldest = next(iter(self._runs.values()), None)
        if oldest is None or oldest.number >= self._begun - max(OLD, 2 * len(self._next)):
            return []
        forgotten = list(oldest.waiting.values())
        for entry in forgotten:
            entry.run = None
        oldest.waiting.clear()
        self._end(oldest)
        return forgotten

    def _remove(self, run: Run, entry: Entry) -> None:
        if len(run.waiting) == 1:
            self._end(run)  # first, so that it is done again if a signal ends it early
        del run.waiting[entry.slot]

    def _end(self, run: Run) -> None:
        self._runs.pop(run.number, None)
        run.going.clear()
        if not self._runs:  # the step is over
            self._next, self._order = dict(pairwise(self._order)), deque[_Key](maxlen=OLD)
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
