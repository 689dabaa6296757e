"""The program with lanes that are first in, first out, for steps of a dozen items: its solutions can be played.

`optimum.Program` lets a lane interrupt a transfer for a more urgent one, and an operator start late for no reason. Here
every store and load stands at an operator, every transfer begins when its lane is free, neither sooner nor later, and
whatever stalls waits for one of them. The rows are those of README.md here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.schedule import Schedule
from tests.passes.planner.instances import scheduled
from tests.passes.planner.optimum import Program, Terms, at, negative, optimum

NEAR = 1.02

On = tuple[int, bool]  # a binary column, and the value at which it is on
Places = dict[int, dict[int, int]]  # for every item, the column of each operator at which its node may stand


@dataclass(frozen=True)
class Lane:
    """`done`: when it is done with an item; `idle`: it had nothing to do before; `before`: whose comes first."""

    done: dict[int, int]
    idle: dict[int, int]
    before: dict[tuple[int, int], On]


class Sequenced(Program):
    every_window = True

    def _rows(self) -> None:
        super()._rows()
        self.offloaded = {i: self.chosen[i][Choice.OFFLOAD] for i in self.moved}
        self._load_rows()
        self.writes = self._lane(self.offloaded, self.paid, self._end, self.write_s, self._stored_behind)
        self.reads = self._lane(self.left, self.loaded, self._issued, self.read_s, self._loaded_behind)
        self._ready_rows()
        self._prompt_rows()
        self._release_stall_rows()
        self._wait_stall_rows()

    # Columns

    def _columns(self) -> None:
        super()._columns()
        step = self.step
        recomputed = [item.recompute_s for item in step.items if Choice.RECOMPUTE in item.choices]
        transfers = [self.write_s[i] + self.read_s[i] + 2 * self.own_s[i] + 2 * self.latency_s for i in self.moved]
        self.all_s = 1.0 + sum(transfers) + sum(recomputed) / self.unit_s  # nothing takes longer
        # loaded[i][q]: read, by a load at q; issue[q]: when loads at q are issued, where it waits for some.
        self.loaded: Places = {
            i: {q: self._new() for q in range(step.forward, step.items[i].first_use + 1)} for i in self.moved
        }
        self.issue = {q: self._new(math.inf, integral=False) for q in sorted(self.waits)}
        # blocking[i]: it is released when it is written; stalls[p, i]: operator p + 1 starts when it is.
        self.blocking = {i: self._new() for i in self.moved}
        self.stalls: dict[tuple[int, int], int] = {}

    def more_points(self) -> set[int]:
        return set(range(self.count))

    def paid_columns(self) -> Places:
        """Here the one operator behind which an item is stored."""
        items, forward = self.step.items, self.step.forward
        return {i: {p: self._new() for p in range(items[i].produced, forward)} for i in self.moved}

    def _issued(self, q: int) -> tuple[float, Terms]:
        return 0.0, [(self.issue.get(q, self.start[q]), 1.0)]

    def _end(self, p: int) -> tuple[float, Terms]:
        """When operator p ends, with its stores and before its releases."""
        fixed, terms = self._between(p, p + 1)
        return fixed, [(self.start[p], 1.0), *terms]

    # Rows

    def _least(self, terms: Terms, low: float, *switches: On) -> None:
        """`terms` are at least `low` where all `switches` are on."""
        off = [(column, -self.all_s if on else self.all_s) for column, on in switches]
        self._add([*terms, *off], low - self.all_s * sum(on for _, on in switches), math.inf)

    def _load_rows(self) -> None:
        """What is read is loaded at one operator, before which it is not back; loads come behind the releases."""
        for i in self.moved:
            self._add([*_all(self.loaded[i]), (self.left[i], -1.0)], 0.0, 0.0)
            for p, needed in self.needed[i].items():
                self._add([(needed, 1.0), *_all(self.loaded[i], p + 1)], -math.inf, 1.0)
            for m, gone in self.gone[i].items():
                loaded = [(column, 1.0) for q, column in self.loaded[i].items() if q <= m]
                if m in self.back[i]:
                    back = self.back[i][m]
                    self._add([*loaded, (back, -1.0)], 0.0, math.inf)
                    self._add([(back, 1.0), (gone, -1.0), *negative(loaded)], -1.0, math.inf)
                elif loaded:
                    self._add([(gone, 1.0), *loaded], -math.inf, 1.0)
        for q, issue in self.issue.items():
            fixed, terms = self._end(q - 1)
            self._add([(issue, 1.0), *negative(terms)], fixed, math.inf)
            self._add([(self.start[q], 1.0), (issue, -1.0)], 0.0, math.inf)

    def _lane(
        self,
        there: Mapping[int, int],
        places: Places,
        when: Callable[[int], tuple[float, Terms]],
        seconds: Mapping[int, float],
        behind_at_one: Callable[[int, int], Iterator[list[On]]],
    ) -> Lane:
        """What is `there` begins `when` its node is reached or its predecessor is done, whichever is later.

        `behind_at_one`: what is so where the first of two comes behind the other if their nodes stand at one operator.
        """
        done = {i: self._new(math.inf, integral=False) for i in self.moved}
        lane = Lane(done, {i: self._new() for i in self.moved}, {})
        for i in self.moved:
            for p, column in places[i].items():
                fixed, terms = when(p)
                here = (column, True)
                self._least([(done[i], 1.0), *negative(terms)], fixed + seconds[i], here)
                self._least([(done[i], -1.0), *terms], -fixed - seconds[i], here, (lane.idle[i], True))
        for a, b in itertools.combinations(self.moved, 2):
            column = self._new()
            lane.before[a, b], lane.before[b, a] = (column, True), (column, False)
        behind: dict[int, list[int]] = {i: [lane.idle[i]] for i in self.moved}
        for (a, b), order in lane.before.items():
            both = (there[a], True), (there[b], True)
            self._least([(done[b], 1.0), (done[a], -1.0)], seconds[b], order, *both)
            self._nodes_in_order(places[a], places[b], 1, (order, (there[a], True)))
            for case in behind_at_one(a, b):
                self._nodes_in_order(places[a], places[b], 0, (order, (there[a], True), *case))
            behind[b].append(self._new())  # its predecessor is a
            self._least([(done[a], 1.0), (done[b], -1.0)], -seconds[b], (behind[b][-1], True))
            self._only_if(behind[b][-1], (there[a], True), order)
        for i, columns in behind.items():
            self._add([*((column, 1.0) for column in columns), (there[i], -1.0)], 0.0, math.inf)
        return lane

    def _stored_behind(self, a: int, b: int) -> Iterator[list[On]]:
        """What blocks comes first, and then what the forward reads last soonest."""
        items = self.step.items
        if (items[a].last_use, a) > (items[b].last_use, b):
            yield [(self.blocking[a], False)]
            yield [(self.blocking[b], True)]

    def _loaded_behind(self, a: int, b: int) -> Iterator[list[On]]:
        """What is needed first comes first."""
        for p in sorted({*self.left_by[a], *self.left_by[b]}):
            cases = [[(a, p, False), (b, p, True)]]
            if a > b:
                cases.append([(i, q, q == p) for i in (a, b) for q in (p - 1, p)])
            for case in cases:
                if (switches := self._uses(case)) is not None:
                    yield switches

    def _uses(self, case: Iterable[tuple[int, int, bool]]) -> list[On] | None:
        """Switches that are on where items are used by operators or are not; None where that cannot be."""
        switches: list[On] = []
        for i, p, used in case:
            needed = at(self.needed[i], p)
            if p >= self.step.items[i].first_use or needed is None:
                if used != (p >= self.step.items[i].first_use):
                    return None
            else:
                switches.append((needed, used))
        return switches

    def _nodes_in_order(self, a: dict[int, int], b: dict[int, int], reach: int, switches: Sequence[On]) -> None:
        """Where all `switches` are on, a has its node before the operator that is `reach` behind the one of b."""
        for p in sorted({*a, *b}):
            first = [(column, 1.0) for q, column in a.items() if q < p + reach]
            then = [(column, -1.0) for q, column in b.items() if q <= p]
            off = [(column, -1.0 if on else 1.0) for column, on in switches]
            self._add([*first, *then, *off], -float(sum(on for _, on in switches)), math.inf)

    def _only_if(self, column: int, *conditions: On) -> None:
        for condition, on in conditions:
            self._add([(condition, 1.0 if on else -1.0), (column, -1.0)], on - 1.0, math.inf)

    def _ready_rows(self) -> None:
        """What is gone was written, what is read was written when its load is issued and is read when it is used.

        What is handed back was not written when the backward begins.
        """
        fixed, begins = self._issued(self.step.forward)
        for i in self.moved:
            written, read = (self.writes.done[i], -1.0), (self.reads.done[i], -1.0)
            for m, gone in self.gone[i].items():
                self._least([(self.start[m], 1.0), written], self.latency_s, (gone, True))
            for q, column in self.loaded[i].items():
                offset, issued = self._issued(q)
                self._least([*issued, written], self.latency_s - offset, (column, True))
            for u, column in self.left_by[i].items():
                self._least([(self.start[u], 1.0), read], self.latency_s, (column, True))
            self._only_if(self.blocking[i], (self.left[i], True))
            self._least([*begins, written], self.latency_s - fixed, (self.blocking[i], True))
            forwarded = (self.offloaded[i], True), (self.left[i], False)
            self._least([*negative([written]), *negative(begins)], fixed - self.latency_s, *forwarded)

    def _prompt_rows(self) -> None:
        """Of what comes up to the write of an item that is handed back, nothing begins behind a pause of the lane that
        ended after the item was produced."""
        for j in self.moved:
            fixed, produced = self._end(self.step.items[j].produced)
            for k in self.moved:
                switches = [(self.offloaded[j], True), (self.left[j], False), (self.writes.idle[k], True)]
                if k != j:
                    switches += [(self.offloaded[k], True), self.writes.before[k, j]]
                self._least([*produced, (self.writes.done[k], -1.0)], -fixed - self.write_s[k], *switches)

    def _release_stall_rows(self) -> None:
        """What comes behind an operator starts at its end, or when a write ends that a release there waits for."""
        forward = self.step.forward
        for p in range(self.count):
            fixed, end = self._end(p)
            _, then = self._issued(p + 1)
            waits: Terms = []
            for i in (i for i in self.moved if self.step.items[i].last_use <= p < forward):
                column = self.stalls[p, i] = self._new()
                waits.append((column, self.all_s))
                self._only_if(column, (self.blocking[i], True))
                stored = [(store, 1.0) for q, store in self.paid[i].items() if q <= p]
                self._add([*stored, (column, -1.0)], 0.0, math.inf)
                written = [(self.writes.done[i], 1.0), *negative(then)]
                self._least(written, -self.latency_s, (column, True))
                self._least(negative(written), self.latency_s, (column, True))
            self._add([*end, *negative(then), *waits], -fixed, math.inf)
            self._add([(column, 1.0) for column, _ in waits], 0.0, 1.0)

    def _wait_stall_rows(self) -> None:
        """An operator starts when its loads are issued, or when one is read that it is the first to use."""
        for q, issue in self.issue.items():
            waits: Terms = []
            for i in self.moved:
                first_here = self._uses([(i, q - 1, False), (i, q, True)])
                if first_here is None or q not in self.left_by[i]:
                    continue
                column = self._new()
                waits.append((column, self.all_s))
                self._only_if(column, (self.left[i], True), *first_here)
                self._least([(self.reads.done[i], 1.0), (self.start[q], -1.0)], -self.latency_s, (column, True))
            self._add([(issue, 1.0), (self.start[q], -1.0), *waits], 0.0, math.inf)
            self._add([(column, 1.0) for column, _ in waits], 0.0, 1.0)

    # Solution

    def schedule(self, solution: Sequence[float], choices: Sequence[Choice]) -> Schedule:
        """Where the nodes stand of what is offloaded."""
        last = self.step.forward - 1
        found: dict[int, dict[str, Any]] = {}
        for i in (i for i, column in self.offloaded.items() if solution[column] > 0.5):
            store = max(self.paid[i], key=lambda p: solution[self.paid[i][p]])
            if solution[self.left[i]] < 0.5:
                found[i] = {"store": store, "release": last, "load": last + 1}
                continue
            load = max(self.loaded[i], key=lambda q: solution[self.loaded[i][q]])
            block = solution[self.blocking[i]] > 0.5
            until = [p for (p, k), column in self.stalls.items() if k == i and solution[column] > 0.5]
            until += [m - 1 for m, column in self.gone[i].items() if m <= last and solution[column] > 0.5]
            soonest = max(store, self.step.items[i].last_use)
            release = min(until, default=last) if block else soonest
            found[i] = {"store": store, "release": release, "load": load, "block": block}
        return scheduled(self.step, choices, found)


def _all(columns: Mapping[int, int], first: int = 0) -> Terms:
    return [(column, 1.0) for p, column in columns.items() if p >= first]


def least_seconds(step: Step, machine: Machine, limit: float, share_bytes: float, plan_s: float) -> float:
    """Seconds that no plan beats; with the lanes in order only where a plan of `plan_s` is not near without."""
    bound = optimum(step, machine, limit, share_bytes).lower_bound
    if plan_s <= NEAR * bound:
        return bound
    return max(bound, optimum(step, machine, limit, share_bytes, program=Sequenced, plan_s=plan_s).lower_bound)
