"""Keep, recompute or offload, for every item together: the least predicted step time, then the fewest bytes written.

What a choice costs depends on all others (the lanes are shared), so candidates are placed and simulated. The search
starts from families that hold the optimum or nearly: some items recomputed, cheapest per byte first; of the others as
many offloaded, in some order, as the budget asks. Then it tries other choices for single items and for pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.place import everything, floor, place
from ssd_fx.passes.simulate import Choice, Outcome, Step, Transfer, simulate

# Operators and items visited by the local search, over all trials: about two seconds of Python.
EFFORT = 1_500_000
ROUNDS = 2  # placements of the same choices, each with the starts that the simulation of the one before gave
TOLERANCE = 1e-4  # step times that differ by a smaller share are equal; then bytes written count


@dataclass(frozen=True)
class Solution:
    """Choices and transfers, with what the simulator says of them."""

    choices: tuple[Choice, ...]
    transfers: Mapping[int, Transfer]
    outcome: Outcome


def solve(
    step: Step, machine: Machine, *, limit: float, share_bytes: float, prefetch: float = float("inf")
) -> Solution:
    """The best choices found with memory never above `limit` bytes and at most `share_bytes` kept of what may leave.

    Raises:
        ValueError: no choices meet `limit`; the message says the least that can be met.
    """
    least = floor(step)
    if limit < least:
        raise ValueError(f"a budget of {int(limit)} B cannot be met; the least that can is {least} B")
    search = _Search(step, machine, limit, share_bytes, prefetch)
    search.families()
    if not search.is_cheapest():
        search.improve()
    if search.best is None:
        raise ValueError(f"a budget of {int(limit)} B cannot be met; the least that can is {least} B")
    return search.best


class _Search:
    def __init__(self, step: Step, machine: Machine, limit: float, share_bytes: float, prefetch: float) -> None:
        self.step, self.machine, self.limit = step, machine, limit
        self.share_bytes, self.prefetch = share_bytes, prefetch
        self.best: Solution | None = None
        self.left = EFFORT
        self.seen: dict[tuple[Choice, ...], bool] = {}

    def families(self) -> None:
        """Recompute the first k by price per byte; of the rest offload as few as the budget allows, in every order."""
        items = self.step.items
        cheap = sorted(
            (i for i, item in enumerate(items) if Choice.RECOMPUTE in item.choices),
            key=lambda i: items[i].recompute_s / items[i].nbytes,
        )
        for recomputed in _steps(len(cheap)):
            if self.is_cheapest():
                return
            chosen = set(cheap[:recomputed])
            for key in self._orders():
                movable = [i for i, item in enumerate(items) if Choice.OFFLOAD in item.choices and i not in chosen]
                self._shortest(chosen, sorted(movable, key=key))

    def is_cheapest(self) -> bool:
        """Whether the best found costs no stall and nothing recomputed, and moves hardly more bytes than must be."""
        if self.best is None:
            return False
        items, outcome = self.step.items, self.best.outcome
        free = sum(item.nbytes for item in items if len(item.choices) > 1)
        must = max(everything(self.step) - self.limit, free - self.share_bytes, 0)
        stalled = outcome.stall_s > TOLERANCE * outcome.seconds or Choice.RECOMPUTE in self.best.choices
        return not stalled and outcome.written <= 1.01 * must

    def _orders(self) -> Iterator[Callable[[int], tuple[float, ...]]]:
        items = self.step.items
        yield lambda i: (items[i].produced - items[i].first_use, -items[i].nbytes, i)  # longest idle first
        yield lambda i: ((items[i].produced - items[i].first_use) * items[i].nbytes, i)  # most idle bytes first
        yield lambda i: (items[i].last_use, i)  # soonest free to go

    def _shortest(self, recomputed: set[int], order: list[int]) -> None:
        """Offload the shortest head of `order` that meets the budget, found by bisection: more offloaded is less memory."""
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if self.try_(self._with(recomputed, order[:middle])):
                high = middle
            else:
                low = middle + 1
        self.try_(self._with(recomputed, order[:low]))

    def _with(self, recomputed: set[int], offloaded: Sequence[int]) -> tuple[Choice, ...]:
        gone = set(offloaded)

        def of(i: int) -> Choice:
            allowed = self.step.items[i].choices
            if i in recomputed:
                return Choice.RECOMPUTE
            if i in gone:
                return Choice.OFFLOAD
            return next(c for c in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE) if c in allowed)

        return tuple(of(i) for i in range(len(self.step.items)))

    def try_(self, choices: tuple[Choice, ...]) -> bool:
        """Place and simulate; whether the budget is met. Remembers the best."""
        if choices in self.seen:
            return self.seen[choices]
        self.left -= len(self.step.seconds) + 4 * len(choices)
        met = self.seen[choices] = self._try(choices)
        return met

    def _try(self, choices: tuple[Choice, ...]) -> bool:
        items = self.step.items
        kept = sum(
            item.nbytes for item, c in zip(items, choices, strict=True) if c is Choice.KEEP and len(item.choices) > 1
        )
        if kept > self.share_bytes:
            return False
        met, starts = False, None
        for _ in range(ROUNDS):
            transfers = place(
                self.step, choices, self.machine, limit=self.limit, prefetch=self.prefetch, starts=starts
            )
            if transfers is None:
                return met
            outcome = simulate(self.step, choices, transfers, self.machine)
            if outcome.peak <= self.limit:
                met = True
                if self.best is None or _better(outcome, self.best.outcome):
                    self.best = Solution(choices, transfers, outcome)
            if outcome.stall_s <= TOLERANCE * outcome.seconds:
                break
            starts = outcome.starts
        return met

    def improve(self) -> None:
        """Other choices for one item, then for two at a time, until nothing helps or the effort is spent."""
        if self.best is None:
            return
        found = True
        while found and self.left > 0:
            found = self._pass(self._singles) or self._pass(self._pairs)

    def _pass(self, moves: Callable[[tuple[Choice, ...]], Iterator[tuple[Choice, ...]]]) -> bool:
        assert self.best is not None
        before = self.best
        for choices in moves(before.choices):
            if self.left <= 0:
                break
            self.try_(choices)
            if self.best is not before:
                return True
        return False

    def _singles(self, choices: tuple[Choice, ...]) -> Iterator[tuple[Choice, ...]]:
        for i, item in enumerate(self.step.items):
            for other in sorted(item.choices - {choices[i]}, key=lambda c: c.value):
                yield (*choices[:i], other, *choices[i + 1 :])

    def _pairs(self, choices: tuple[Choice, ...]) -> Iterator[tuple[Choice, ...]]:
        for i, first in enumerate(self.step.items):
            for k in range(i + 1, len(self.step.items)):
                for a in sorted(first.choices - {choices[i]}, key=lambda c: c.value):
                    for b in sorted(self.step.items[k].choices - {choices[k]}, key=lambda c: c.value):
                        yield (*choices[:i], a, *choices[i + 1 : k], b, *choices[k + 1 :])


def _steps(count: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... and `count`: about even ratios."""
    steps, at = {0, count}, 1.0
    while at < count:
        steps.add(int(at))
        at = at + 1 if at < 4 else at * 1.3
    return sorted(steps)


def _better(a: Outcome, b: Outcome) -> bool:
    if abs(a.seconds - b.seconds) > TOLERANCE * b.seconds:
        return a.seconds < b.seconds
    return (a.written, a.seconds) < (b.written, b.seconds)
