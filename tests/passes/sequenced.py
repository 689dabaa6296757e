"""The program with lanes that are not interrupted: who is written and read before whom, for steps of a dozen items.

`optimum.Program` lets a lane interrupt a transfer for a more urgent one, which no plan can. Here every pair of writes
has an order, and a read that was begun earlier is in the way of a later one. The rows are those of docs/planner.md.
"""

from __future__ import annotations

import itertools
import math

from ssd_fx.passes.machine import Machine
from ssd_fx.passes.simulate import Choice, Step
from tests.passes.optimum import Program, Terms, optimum

NEAR = 1.02


class Sequenced(Program):
    def __init__(
        self, step: Step, machine: Machine, limit: float, share_bytes: float | None, rows: int | None = None
    ) -> None:
        super().__init__(step, machine, limit, share_bytes, rows)
        moved = [item for item in step.items if math.isfinite(item.recompute_s)]
        transfers = sum(self.write_s[i] + self.read_s[i] + 2 * self.own_s[i] + 2 * self.latency_s for i in self.moved)
        self.all_s = 1.0 + transfers + sum(item.recompute_s for item in moved) / self.unit_s  # nothing takes longer
        # written[i]: when the lane is done with item i; before[a, b]: a is written before b, if both are.
        self.written = {i: self._new(math.inf, integral=False) for i in self.moved}
        self.before: dict[tuple[int, int], Terms] = {}
        self.ahead_of: dict[int, dict[int, int]] = {k: {} for k in self.moved}  # what is written before k
        for a, b in itertools.combinations(self.moved, 2):
            column = self._new()
            self._ordered(a, b, [(column, 1.0)], 0.0)
            self._ordered(b, a, [(column, -1.0)], 1.0)
        self._lane_rows()
        self._busy_rows()
        self._overtaking_rows()
        self._stall_rows()

    def more_points(self) -> set[int]:
        return set(range(self.step.forward))

    def _offloaded(self, i: int) -> int:
        return self.chosen[i][Choice.OFFLOAD]

    def _ordered(self, a: int, b: int, terms: Terms, fixed: float) -> None:
        """`terms + fixed` is 1 if a is written before b."""
        self.before[a, b] = [*terms, (-1, fixed)]
        both = [(self._offloaded(a), 1.0), (self._offloaded(b), 1.0)]
        later = [(self.written[b], 1.0), (self.written[a], -1.0)]
        off = [(column, -self.all_s * sign) for column, sign in [*terms, *both]]
        self._add([*later, *off], self.write_s[b] - self.all_s * (3.0 - fixed), math.inf)
        counted = self._new(integral=False)  # a is offloaded and written before b
        self._add([(self._offloaded(a), 1.0), (counted, -1.0)], 0.0, math.inf)
        self._add([*terms, (counted, -1.0)], -fixed, math.inf)
        self.ahead_of[b][a] = counted

    def _lane_rows(self) -> None:
        """A write begins behind its store and what that costs; what is gone was written, what leaves is read after."""
        for i in self.moved:
            item, done = self.step.items[i], (self.written[i], -1.0)
            begin = [(self.written[i], 1.0), (self.start[item.produced], -1.0)]
            takes_s = self.own_s[i] + self.write_s[i]
            self._add([*begin, (self._offloaded(i), -takes_s)], self._seconds(item.produced), math.inf)
            for m, gone in self.gone[i].items():
                terms = [(self.start[m], 1.0), done, (gone, -self.all_s)]
                self._add(terms, self.latency_s - self.all_s, math.inf)
            read_s = 2 * self.latency_s + self.read_s[i] - self.all_s
            used = (self.start[item.first_use], 1.0)
            self._add([used, done, (self.left[i], -self.all_s)], read_s, math.inf)

    def _busy_rows(self) -> None:
        """Until the write of j begins, which is handed back, the lane does what comes before it, without a pause."""
        last = self.step.forward - 1
        for j in self.moved:
            handed_back = [(self._offloaded(j), -self.all_s), (self.left[j], self.all_s)]
            done = [(self.written[j], 1.0), (self.start[last], -1.0), *handed_back]
            self._add(done, self._seconds(last) - self.latency_s - self.all_s, math.inf)
            s = self.step.items[j].produced
            there = [(self.start[s], 1.0), *((paid[s], self.own_s[i]) for i, paid in self.paid.items() if s in paid)]
            for k in self.moved:
                terms = [*there, *self._ahead(k, last), (self.written[k], -1.0), *handed_back]
                fixed = -self._seconds(s) - self.write_s[k] - self.all_s
                if k != j:
                    order, (_, constant) = self.before[k, j][:-1], self.before[k, j][-1]
                    terms += [(column, -self.all_s * sign) for column, sign in order]
                    terms.append((self._offloaded(k), -self.all_s))
                    fixed -= self.all_s * (2.0 - constant)
                self._add(terms, fixed, math.inf)

    def _ahead(self, k: int, p: int) -> Terms:
        """Seconds of what is written before item k and was produced at p or before."""
        ahead = self.ahead_of[k].items()
        return [(column, self.write_s[i]) for i, column in ahead if self.step.items[i].produced <= p]

    def _stall_rows(self) -> None:
        """The forward stalls only behind an operator whose release waits for a write that the lane is busy with."""
        for p in range(self.step.forward - 1):
            fixed, terms = self._between(p, p + 1)
            soonest = [(self.start[p], 1.0), (self.start[p + 1], -1.0), *terms]
            waits: Terms = []
            for i in (i for i in self.moved if self.step.items[i].last_use <= p):
                column = self._new()
                waits.append((column, self.all_s))
                self._add([(self.left[i], 1.0), (column, -1.0)], 0.0, math.inf)
                off = (column, -self.all_s)
                busy_s = fixed + self.latency_s + self.write_s[i]
                self._add([*soonest, *self._ahead(i, p), off], -busy_s - self.all_s, math.inf)
                done = [(self.written[i], 1.0), (self.start[p + 1], -1.0), off]
                self._add(done, -self.latency_s - self.all_s, math.inf)
            self._add([*soonest, *waits], -fixed, math.inf)
            self._add([(column, 1.0) for column, _ in waits], 0.0, 1.0)

    def _overtaking_rows(self) -> None:
        """What is used later than j and loaded before it is read before it."""
        items, forward = self.step.items, self.step.forward
        for j in self.moved:
            u = items[j].first_use
            in_the_way: dict[int, int] = {}
            for i in self.moved:
                rows = [m for m in self.back[i] if m in self.gone[j] and items[i].first_use > u]
                for m in rows:
                    column = in_the_way.setdefault(i, self._new(integral=False))
                    terms = [(column, 1.0), (self.back[i][m], -1.0), (self.gone[j][m], -1.0)]
                    terms += [(self.back[j][m], 1.0)] if m in self.back[j] else []
                    self._add(terms, -1.0, math.inf)
            if in_the_way:
                for q in [forward, *(m + 1 for m in self.tight if m >= forward)]:
                    if q <= u:
                        self._reads(j, q, in_the_way)


def least_seconds(step: Step, machine: Machine, limit: float, share_bytes: float, plan_s: float) -> float:
    """Seconds that no plan beats; with the lanes in order only where a plan of `plan_s` is not near without."""
    bound = optimum(step, machine, limit, share_bytes).lower_bound
    if plan_s <= NEAR * bound:
        return bound
    return max(bound, optimum(step, machine, limit, share_bytes, program=Sequenced).lower_bound)
