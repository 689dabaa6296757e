"""The exact optimum of a training step as a mixed-integer program, solved by HiGHS: what the planner is compared with.

Every placement that `replay` can play (stores delayed or not, releases that block or hand over, loads forwarded or
read) fulfils every row, so the dual bound is a lower bound of any plan's seconds. What the program leaves out is only
that a lane cannot be interrupted; README.md here has the rows and why each holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from tests.passes.planner.memory_rows import memory_rows

Terms = list[tuple[int, float]]  # (column, coefficient)
Since = dict[int, int]  # by operator, in order, the column that says whether something is so there and until the next
TOLERANCE = 1e-5  # by which a plan may break a row: HiGHS allows 1e-6 in each


@dataclass(frozen=True)
class Bound:
    """`seconds` of the best solution found (infinite if none) and its choices; no plan is faster than `lower_bound`.

    `feasible` is False only where it is proven that nothing fits.
    """

    seconds: float
    lower_bound: float
    choices: tuple[Choice, ...]
    feasible: bool
    status: str


def optimum(
    step: Step,
    machine: Machine,
    limit: float,
    share_bytes: float | None,
    *,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    rows: int | None = None,
    program: type[Program] | None = None,
    plan_s: float = math.inf,
) -> Bound:
    """Fewest seconds under `limit` bytes at every operator and `share_bytes` kept of what can leave (None: any).

    `rows`: at most so many operators have a memory row, those of the highest base between two events; fewer rows make
    the program smaller and its optimum lower, so `lower_bound` stays one. `program`: `Sequenced` is tighter and slower.
    `plan_s`: seconds of a plan; nothing slower is looked at.
    """
    built = (program or Program)(step, machine, limit, share_bytes, rows, plan_s)
    result = built.solve(gap, time_limit)
    if result.status == 2:
        return Bound(math.inf, math.inf, (), False, result.message)
    bound = result.mip_dual_bound
    lower = max(bound or 0.0, 1.0 if sum(step.seconds) else 0.0) * built.unit_s  # in vain, the operators' own seconds
    if result.x is None:
        return Bound(math.inf, lower, (), True, result.message)
    return Bound(result.fun * built.unit_s, lower, built.choices(result.x), True, result.message)


class Program:
    """The columns and rows of one instance; seconds are counted in `unit_s`, bytes in `limit`."""

    every_window = False  # rows for every part of the time that something waited; too many for a large graph

    def __init__(
        self,
        step: Step,
        machine: Machine,
        limit: float,
        share_bytes: float | None,
        rows: int | None = None,
        plan_s: float = math.inf,
    ) -> None:
        self.step, self.machine, self.limit, self.share_bytes = step, machine, limit, share_bytes
        self.unit_s = sum(step.seconds) or 1.0
        self.plan_s = plan_s / self.unit_s * (1 + TOLERANCE)
        self.count = len(step.seconds)
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.moved = [i for i, item in enumerate(step.items) if Choice.OFFLOAD in item.choices]
        self.tight = memory_rows(step, limit, rows)
        self._columns()
        self._rows()

    def _rows(self) -> None:
        self._choice_rows()
        self._need_rows()
        self._order_rows()
        self._memory_rows()
        self._compute_rows()
        self._write_rows()
        self._hand_back_rows()
        self._read_rows()

    # Columns

    def _new(self, upper: float = 1.0, integral: bool = True) -> int:
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.upper) - 1

    def _columns(self) -> None:
        step, items = self.step, self.step.items
        self.chosen = [{c: self._new() for c in sorted(item.choices, key=lambda c: c.value)} for item in items]
        # gone[i][m]: released before row m; back[i][m]: loaded before row m or at it, after it was gone at a row.
        self.gone: list[dict[int, int]] = [{} for _ in items]
        self.back: list[dict[int, int]] = [{} for _ in items]
        for i in self.moved:
            gap = [m for m in self.tight if items[i].last_use < m < items[i].first_use]
            self.gone[i] = {m: self._new() for m in gap}
            self.back[i] = {m: self._new() for m in gap[1:] if m >= step.forward}
        # left[i]: written before its load. An offloaded item that is not was handed back; under_way[i]: it is the one
        # that is being written when the forward ends.
        self.left = {i: self._new() for i in self.moved}
        self.under_way = {i: self._new(integral=False) for i in self.moved}
        self.write_s = {i: items[i].moved_nbytes / self.machine.write_bw / self.unit_s for i in self.moved}
        self.read_s = {i: items[i].moved_nbytes / self.machine.read_bw / self.unit_s for i in self.moved}
        self.latency_s = self.machine.latency_s / self.unit_s
        uses = {item.first_use for item in items}
        points = {0, step.forward - 1, step.forward, self.count, *self.tight, *uses, *(m + 1 for m in self.tight)}
        self.points = sorted(points | {item.produced for item in items} | self.more_points())
        self.start = {p: self._new(self.plan_s, integral=False) for p in self.points}
        # paid[i][p]: the part of the store's own seconds that the operators from point p to the next one have.
        self.own_s = {i: self.machine.own_s(items[i].moved_nbytes) / self.unit_s for i in self.moved}
        self.paid = self.paid_columns()
        self._use_columns()

    def _use_columns(self) -> None:
        """What is first used where: a chain that is computed again needs its inputs before they are first used."""
        items = self.step.items
        early = early_uses(self.step)
        again = {i: chosen[Choice.RECOMPUTE] for i, chosen in enumerate(self.chosen) if Choice.RECOMPUTE in chosen}
        offloaded = {i: self.chosen[i][Choice.OFFLOAD] for i in self.moved}

        def since(columns: Mapping[int, int]) -> dict[int, Since]:
            """A column for every early use of an item, and its own one from its first use on."""
            new = {i: {p: self._new(integral=False) for p in early[i]} for i in columns}
            return {i: {**new[i], items[i].first_use: column} for i, column in columns.items()}

        # needed[i][p]: a chain needs it before operator p or at it; again, waited, left_by: that, and it is recomputed,
        # offloaded, written.
        self.needed: list[Since] = [{p: self._new(integral=False) for p in uses} for uses in early]
        self.again, self.waited, self.left_by = since(again), since(offloaded), since(self.left)
        # shared[s][p]: what several items share has been computed again before operator p or at it.
        self.shared: list[Since] = []
        for shared in self.step.shared:
            uses = {p for i in shared.items if i in again for p in self.again[i]}
            self.shared.append({p: self._new(integral=False) for p in sorted(uses)})
        # missed[i][p]: needed, and gone at a row before that.
        self.missed = {i: {p: self._new(integral=False) for p in early[i] if self.gone[i]} for i in self.moved}
        self.waits = {p for waited in self.waited.values() for p in waited}

    def paid_columns(self) -> dict[int, dict[int, int]]:
        items, forward = self.step.items, self.step.forward
        return {
            i: {p: self._new(integral=False) for p in self.points if items[i].produced <= p < forward}
            for i in self.moved
            if self.own_s[i] > 0
        }

    def more_points(self) -> set[int]:
        return set()

    # Rows

    def _add(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        for column, value in terms:
            self.row.append(len(self.lows))
            self.column.append(column)
            self.value.append(value)
        self.lows.append(low)
        self.highs.append(high)

    def _choice_rows(self) -> None:
        for chosen in self.chosen:
            self._add([(column, 1.0) for column in chosen.values()], 1.0, 1.0)
        if self.share_bytes is not None:
            can_leave = [i for i, item in enumerate(self.step.items) if item.choices != {Choice.KEEP}]
            kept = [(i, self.chosen[i][Choice.KEEP]) for i in can_leave if Choice.KEEP in self.chosen[i]]
            scale = 1.0 / self.limit
            terms = [(column, self.step.items[i].nbytes * scale) for i, column in kept]
            self._add(terms, -math.inf, self.share_bytes * scale)

    def _need_rows(self) -> None:
        """A chain that is computed again needs its inputs where its result is first used."""
        for j, needed in enumerate(self.needed):
            chains = [self.again[i] for i in self.again if j in self.step.items[i].needs]
            self._any_of(needed, chains)
        for uses in (self.again, self.waited, self.left_by):
            for i, columns in uses.items():
                self._both(columns, self.needed[i], columns[self.step.items[i].first_use])
        for i, columns in self.missed.items():
            if columns:
                self._both(columns, self.needed[i], self.gone[i][max(self.gone[i])])
        for shared, columns in zip(self.step.shared, self.shared, strict=True):
            self._any_of(columns, [self.again[i] for i in shared.items if i in self.again])

    def _any_of(self, columns: Since, of: Sequence[Since]) -> None:
        """At every operator the column is the largest of those of others."""
        for p, column in columns.items():
            others = [other for each in of if (other := at(each, p)) is not None]
            for other in others:
                self._add([(column, 1.0), (other, -1.0)], 0.0, math.inf)
            self._add([*((other, 1.0) for other in others), (column, -1.0)], 0.0, math.inf)
        self._for_good(columns)

    def _both(self, columns: Since, needed: Since, whole: int) -> None:
        """At every early use the column says whether the item is `needed` there and `whole` is so."""
        for p, need in needed.items():
            column = columns[p]
            self._add([(column, 1.0), (need, -1.0), (whole, -1.0)], -1.0, math.inf)
            self._add([(need, 1.0), (column, -1.0)], 0.0, math.inf)
            self._add([(whole, 1.0), (column, -1.0)], 0.0, math.inf)
        self._for_good(columns)

    def _for_good(self, columns: Since) -> None:
        for a, b in itertools.pairwise(columns.values()):
            self._add([(b, 1.0), (a, -1.0)], 0.0, math.inf)

    def _order_rows(self) -> None:
        """Gone only if it leaves, back only if gone at an earlier row, and both for good."""
        for i in self.moved:
            gone = list(self.gone[i].items())
            for (_, earlier), (m, later) in itertools.pairwise(gone):
                self._add([(later, 1.0), (earlier, -1.0)], 0.0, math.inf)
                if m in self.back[i]:
                    self._add([(earlier, 1.0), (self.back[i][m], -1.0)], 0.0, math.inf)
            self._add([(self.chosen[i][Choice.OFFLOAD], 1.0), (self.left[i], -1.0)], 0.0, math.inf)
            if gone:
                self._add([(self.left[i], 1.0), (gone[-1][1], -1.0)], 0.0, math.inf)
            self._for_good(self.back[i])
            for m, column in gone:
                if (needed := at(self.needed[i], m)) is not None:  # it is back if it was gone
                    back = [(self.back[i][m], 1.0)] if m in self.back[i] else []
                    self._add([*back, (column, -1.0), (needed, -1.0)], -1.0, math.inf)

    def _memory_rows(self) -> None:
        for m in self.tight:
            fixed, terms = float(self.step.base[m]), []
            for i, item in enumerate(self.step.items):
                if not item.produced <= m <= item.last_bwd_use:
                    continue
                if not item.last_use < m < item.first_use:
                    fixed += item.nbytes
                    continue
                alive = [(self.chosen[i][c], 1.0) for c in (Choice.KEEP, Choice.OFFLOAD) if c in self.chosen[i]]
                if m in self.gone[i]:
                    alive.append((self.gone[i][m], -1.0))
                if m in self.back[i]:
                    alive.append((self.back[i][m], 1.0))
                if i in self.again and (again := at(self.again[i], m)) is not None:
                    alive.append((again, 1.0))
                terms += [(column, sign * item.nbytes / self.limit) for column, sign in alive]
            self._add(terms, -math.inf, 1.0 - fixed / self.limit)

    def _between(self, first: int, last: int) -> tuple[float, Terms]:
        """Seconds of the operators from point `first` up to point `last`: a constant, and what choices add."""
        terms: Terms = []
        for columns, seconds in self._costs():
            before, behind = at(columns, first - 1), at(columns, last - 1)
            if before != behind:
                terms += [(c, sign * seconds) for c, sign in ((behind, 1.0), (before, -1.0)) if c is not None]
        for i, paid in self.paid.items():
            terms += [(column, self.own_s[i]) for p, column in paid.items() if first <= p < last]
        return sum(self.step.seconds[first:last]) / self.unit_s, terms

    def _costs(self) -> Iterator[tuple[Since, float]]:
        """What choices cost at first uses: computing again, what is shared of that once, and waits' own seconds."""
        own = self.step.own_again_s
        yield from ((columns, own[i] / self.unit_s) for i, columns in self.again.items())
        pairs = zip(self.shared, self.step.shared, strict=True)
        yield from ((columns, shared.seconds / self.unit_s) for columns, shared in pairs)
        yield from ((columns, self.own_s[i]) for i, columns in self.waited.items())

    def _compute_rows(self) -> None:
        self._add([(self.start[0], 1.0)], 0.0, 0.0)
        for p, q in itertools.pairwise(self.points):
            fixed, terms = self._between(p, q)
            minus = [(column, -value) for column, value in terms]
            self._add([(self.start[q], 1.0), (self.start[p], -1.0), *minus], fixed, math.inf)
        for i, paid in self.paid.items():
            self._add([*((c, 1.0) for c in paid.values()), (self.chosen[i][Choice.OFFLOAD], -1.0)], 0.0, 0.0)
            for m, gone in self.gone[i].items():
                if m < self.step.forward:
                    before = [(column, 1.0) for p, column in paid.items() if p < m]
                    self._add([*before, (gone, -1.0)], 0.0, math.inf)

    def _write_rows(self) -> None:
        """What is produced at s or later and gone at row m was written between the end of s and the start of m."""
        items = self.step.items
        for j in self.moved:
            s = items[j].produced
            later = [i for i in self.moved if items[i].produced >= s]
            for m in self.gone[j]:
                written = {i: column for i in later if (column := self._written_by(i, m)) is not None}
                own_s = self.latency_s + min(self.own_s[i] for i in written)
                terms = [(column, self.write_s[i] + (own_s if i == j else 0.0)) for i, column in written.items()]
                self._add([(self.start[m], 1.0), (self.start[s], -1.0), *negative(terms)], self._seconds(s), math.inf)
            for u in self.left_by[j]:
                self._leaving_row(s, j, u, later)

    def _leaving_row(self, s: int, j: int, u: int, later: list[int]) -> None:
        """What leaves is written before it is used, and at least the one that is written last is read after that."""
        written = {i: column for i in later if (column := at(self.left_by[i], u)) is not None}
        own_s = 2 * self.latency_s + min(self.read_s[i] for i in written) + min(self.own_s[i] for i in written)
        terms = [(column, self.write_s[i] + (own_s if i == j else 0.0)) for i, column in written.items()]
        self._add([(self.start[u], 1.0), (self.start[s], -1.0), *negative(terms)], self._seconds(s), math.inf)

    def _written_by(self, i: int, m: int) -> int | None:
        """The column that says whether item i was written before row m."""
        return self.left[i] if m >= self.step.items[i].first_use else self.gone[i].get(m)

    def _seconds(self, p: int) -> float:
        return self.step.seconds[p] / self.unit_s

    def _hand_back_rows(self) -> None:
        """While what is handed back waited, the lane wrote other things that leave, and began one that need not.

        It waited from the operator that produced it on, and so from every later row on, whose memory says what was
        written before; up to the end of an operator the lane wrote only what earlier ones produced (`every_window`).
        """
        items, forward = self.step.items, self.step.forward
        rows = [m for m in self.tight if m < forward] if self.every_window else []
        self._add([(column, 1.0) for column in self.under_way.values()], 0.0, 1.0)
        producers = {forward - 1, *(items[i].produced for i in self.moved)} if self.every_window else set()
        until = [(p, self._seconds(p), [(self.start[p], 1.0)]) for p in sorted(producers)]
        until.append((forward, *self._issued(forward)))
        for j in self.moved:
            forwarded = [(self.chosen[j][Choice.OFFLOAD], 1.0), (self.left[j], -1.0)]
            self._add([*forwarded, (self.under_way[j], -1.0)], 0.0, math.inf)
            s = items[j].produced
            paid = [(paid[s], self.own_s[i]) for i, paid in self.paid.items() if s in paid]
            since = [(m, m, 0.0, [(self.start[m], 1.0)]) for m in rows if s < m]
            since.append((s, s + 1, self._seconds(s), [(self.start[s], 1.0), *paid]))
            for (m, first, low, begins), (p, high, ends) in itertools.product(since, until):
                if m < p and (m == s or p == forward):
                    waited = sum(self.step.seconds[first : p + 1] if p < forward else self.step.seconds[first:p])
                    window = high - low - self.latency_s, [*ends, *negative(begins)]
                    self._busy(j, m, p, waited / self.unit_s - self.latency_s, window)

    def _busy(self, j: int, m: int, p: int, waited: float, window: tuple[float, Terms]) -> None:
        """If j is handed back, its lane works in all of a window of at least `waited`, on what is produced before p.

        What is gone at a row up to m was written before that.
        """
        written: Terms = []
        for i in (i for i in self.moved if self.step.items[i].produced < p):
            written.append((self.under_way[i], self.write_s[i]))
            if i != j:
                written.append((self.left[i], self.write_s[i]))
                gone = [column for row, column in self.gone[i].items() if row <= m]
                written += [(column, -self.write_s[i]) for column in gone[-1:]]
        off = max(waited, 0.0) + sum(self.own_s.values()) + sum(self.write_s.values())
        off += (len(self.moved) + 1) * self.latency_s
        kept = [(self.chosen[j][Choice.OFFLOAD], -1.0), (self.left[j], 1.0)]
        self._add([*written, *((column, waited * sign) for column, sign in kept)], 0.0, math.inf)
        fixed, terms = window
        self._add([*written, *negative(terms), *((column, off * sign) for column, sign in kept)], fixed - off, math.inf)

    def _read_rows(self) -> None:
        """What is loaded at q or later and used at u or before is read between the end of q - 1 and the start of u."""
        issues = [self.step.forward, *(m + 1 for m in self.tight if m >= self.step.forward)]
        for j in self.moved:
            for u, q in itertools.product(self.left_by[j], issues):
                if q <= u:
                    self._reads(j, q, u)

    def _reads(self, j: int, q: int, u: int) -> None:
        terms: Terms = []
        for i in self.moved:
            seconds = self.read_s[i] + (self.latency_s if i == j else 0.0)
            leaves = at(self.left_by[i], u) if q == self.step.forward else self._missed(i, u)
            if self.step.items[i].first_use >= q and leaves is not None:
                terms.append((leaves, seconds))
                if q - 1 in self.back[i]:
                    terms.append((self.back[i][q - 1], -seconds))
        fixed, issued = self._issued(q)
        self._add([(self.start[u], 1.0), *negative(issued), *negative(terms)], fixed, math.inf)

    def _missed(self, i: int, u: int) -> int | None:
        """The column that says whether item i is used before operator u or at it, and was gone at a row before."""
        if self.step.items[i].first_use > u:
            return at(self.missed[i], u)
        return self.gone[i][max(self.gone[i])] if self.gone[i] else None

    def _issued(self, q: int) -> tuple[float, Terms]:
        """When a load at q starts, at the earliest: before the waits of q, so where q has some, at the end of q - 1."""
        if q not in self.waits:
            return 0.0, [(self.start[q], 1.0)]
        fixed, terms = self._between(q - 1, q)
        return fixed, [(self.start[q - 1], 1.0), *terms]

    # Solution

    def solve(self, gap: float, time_limit: float):  # type: ignore[no-untyped-def]
        shape = (len(self.lows), len(self.upper))
        matrix = csr_array((self.value, (self.row, self.column)), shape=shape)
        objective = np.zeros(len(self.upper))
        objective[self.start[self.count]] = 1.0
        return milp(
            objective,
            integrality=np.array(self.integral),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, np.array(self.lows), np.array(self.highs)),
            options={"mip_rel_gap": gap, "time_limit": time_limit},
        )

    def choices(self, solution: Sequence[float]) -> tuple[Choice, ...]:
        return tuple(max(chosen, key=lambda c: solution[chosen[c]]) for chosen in self.chosen)


def early_uses(step: Step) -> list[list[int]]:
    """The operators before which every item may be needed sooner than it is used: to compute others again."""
    early: list[set[int]] = [set() for _ in step.items]
    for i in sorted(range(len(step.items)), key=lambda i: step.items[i].produced, reverse=True):
        item = step.items[i]
        for needed in item.needs if Choice.RECOMPUTE in item.choices else ():
            early[needed] |= {p for p in {item.first_use, *early[i]} if p < step.items[needed].first_use}
    return [sorted(uses) for uses in early]


def at(columns: Since, p: int) -> int | None:
    """The column that holds at operator p; None before the first one."""
    return next((column for since, column in reversed(columns.items()) if since <= p), None)


def negative(terms: Terms) -> Terms:
    return [(column, -value) for column, value in terms]
