"""Keep, recompute or offload, for every item together: the least predicted step time, then the fewest bytes written.

What a choice costs depends on all others (the lanes are shared), so candidates are placed and simulated. The search
starts from families that hold the optimum or nearly: some items recomputed, cheapest per byte first; of the others as
many offloaded, in some order, as the budget asks. Then it tries other choices for single items and for pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

from ssd_fx.passes.costs import Machine
from ssd_fx.passes.place import LOAD_MARGIN, everything, floor, place
from ssd_fx.passes.refine import TOLERANCE, Solution, better, fits, kept_bytes, refine
from ssd_fx.passes.simulate import Choice, Step, simulate

# Operators and items visited over all trials of the search; a million takes one to two seconds of Python. In proportion
# to the size of the step, as the time to compile its graphs is; small steps, which cost nothing, get more.
TRIALS = 150
LEAST_EFFORT = 30_000
POOL = 4  # so many of the best choices get their transfers moved
EXHAUSTIVE = 1024  # up to so many choices are all tried
KICKS = 40  # random choices that lead nowhere before the search ends
# Placements of the same choices, each with the starts that the one before led to; the last leaves most memory free.
MARGINS = (LOAD_MARGIN, LOAD_MARGIN, 1.0)


class BudgetError(ValueError):
    """No choices meet the budget; `least` is the memory in bytes that can be met."""

    def __init__(self, limit: float, least: int) -> None:
        super().__init__(f"a budget of {int(limit)} B cannot be met; the least that can is {least} B")
        self.least = least


def solve(
    step: Step,
    machine: Machine,
    *,
    limit: float,
    share_bytes: float,
    prefetch: float = float("inf"),
) -> Solution:
    """The best choices found with memory never above `limit` bytes and at most `share_bytes` kept of what may leave.

    Raises:
        BudgetError: no choices meet `limit`; the message says the least that can be met.
    """
    least = floor(step)
    if limit < least:
        raise BudgetError(limit, least)
    search = _Search(step, machine, limit, share_bytes, prefetch)
    search.families()
    if not search.is_cheapest():
        search.improve()
    if search.best is None:
        raise BudgetError(limit, least)
    if search.is_cheapest():
        return search.best
    best = search.best
    for start in search.pool:
        refined = refine(step, machine, start, limit=limit, share_bytes=share_bytes, effort=_effort(step) // POOL)
        best = refined if better(refined.outcome, best.outcome) else best
    return best


Moves = Callable[[tuple[Choice, ...]], Iterator[tuple[Choice, ...]]]


class _Search:
    def __init__(self, step: Step, machine: Machine, limit: float, share_bytes: float, prefetch: float) -> None:
        self.step, self.machine, self.limit = step, machine, limit
        self.share_bytes, self.prefetch = share_bytes, prefetch
        self.best: Solution | None = None
        self.pool: list[Solution] = []  # the best so far, fastest first
        self.left = _effort(step)
        self.seen: dict[tuple[Choice, ...], Solution | None] = {}

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
        """Offload the shortest head of `order` that meets the budget, by bisection: more offloaded is less memory."""
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
        """Whether the budget is met. Remembers the best."""
        return self.solution(choices) is not None

    def solution(self, choices: tuple[Choice, ...]) -> Solution | None:
        """The choices placed and simulated, None where the budget is not met. Remembers the best."""
        if choices in self.seen:
            return self.seen[choices]
        found = None
        if kept_bytes(self.step, choices) <= self.share_bytes:
            found = self._placed(choices)
        self.seen[choices] = found
        if found is not None:
            self.pool = sorted([*self.pool, found], key=lambda s: s.outcome.seconds)[:POOL]
        if found is not None and (self.best is None or better(found.outcome, self.best.outcome)):
            self.best = found
        return found

    def _placed(self, choices: tuple[Choice, ...]) -> Solution | None:
        """Placed as if nothing stalled, then again with the starts that the simulation gave; the better of the two."""
        best, starts = None, None
        for margin in MARGINS:
            self.left -= len(self.step.seconds) + 4 * len(choices)
            transfers = place(
                self.step,
                choices,
                self.machine,
                limit=self.limit,
                prefetch=self.prefetch,
                starts=starts,
                margin=margin,
            )
            if transfers is None:
                break
            outcome = simulate(self.step, choices, transfers, self.machine)
            if fits(outcome, self.limit) and (best is None or better(outcome, best.outcome)):
                best = Solution(choices, transfers, outcome)
            if outcome.stall_s <= TOLERANCE * outcome.seconds:
                break
            starts = outcome.starts
        return best

    def improve(self) -> None:
        """Other choices for one item, then for two at a time; then the same from a few random choices nearby.

        The random choices are those of a fixed seed: the same step gets the same plan on every machine.
        """
        if self.best is None:
            return
        allowed = [self._allowed(i) for i in range(len(self.step.items))]
        if math.prod(len(a) for a in allowed) <= EXHAUSTIVE:
            for choices in itertools.product(*allowed):
                if self.left > 0:
                    self.solution(choices)
            return
        self._descend(self.best.choices, (self._singles, self._pairs))
        random, failed = Random(0), 0
        while failed < KICKS and self.left > 0 and not self.is_cheapest():
            before = self.best
            self._descend(self._kicked(random), (self._singles,))
            failed = failed + 1 if self.best is before else 0

    def _descend(self, choices: tuple[Choice, ...], families: tuple[Moves, ...]) -> None:
        """Change to the first better neighbour while there is one."""
        now = self.solution(choices)
        moved = True
        while moved and self.left > 0:
            moved = False
            for neighbour in itertools.chain.from_iterable(moves(choices) for moves in families):
                found = self.solution(neighbour)
                if found is not None and (now is None or better(found.outcome, now.outcome)):
                    choices, now, moved = neighbour, found, True
                    break
                if self.left <= 0:
                    break

    def _kicked(self, random: Random) -> tuple[Choice, ...]:
        """The best choices with those of two to four items changed."""
        assert self.best is not None
        choices = list(self.best.choices)
        free = [i for i, item in enumerate(self.step.items) if len(item.choices) > 1]
        for i in random.sample(free, min(len(free), random.randint(2, 4))):
            choices[i] = random.choice(self._others(i, choices[i]))
        return tuple(choices)

    def _allowed(self, i: int) -> list[Choice]:
        return sorted(self.step.items[i].choices, key=lambda c: c.value)

    def _others(self, i: int, choice: Choice) -> list[Choice]:
        return [c for c in self._allowed(i) if c is not choice]

    def _singles(self, choices: tuple[Choice, ...]) -> Iterator[tuple[Choice, ...]]:
        for i in range(len(self.step.items)):
            for other in self._others(i, choices[i]):
                yield (*choices[:i], other, *choices[i + 1 :])

    def _pairs(self, choices: tuple[Choice, ...]) -> Iterator[tuple[Choice, ...]]:
        for i in range(len(self.step.items)):
            for k in range(i + 1, len(self.step.items)):
                for a in self._others(i, choices[i]):
                    for b in self._others(k, choices[k]):
                        yield (*choices[:i], a, *choices[i + 1 : k], b, *choices[k + 1 :])


def _effort(step: Step) -> int:
    return max(LEAST_EFFORT, TRIALS * (len(step.seconds) + 4 * len(step.items)))


def _steps(count: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... and `count`: about even ratios."""
    steps, at = {0, count}, 1.0
    while at < count:
        steps.add(int(at))
        at = at + 1 if at < 4 else at * 1.3
    return sorted(steps)
