"""Keep, recompute or offload, for every item together: the least predicted step time, then the fewest bytes written.

What a choice costs depends on all others (the lanes are shared), so candidates are placed and simulated. The search
starts from families that hold the optimum or nearly: some items recomputed, cheapest per byte first; of the others as
many offloaded, in some order, as the budget asks. Then it tries other choices for single items and for pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from ssd_fx.passes import tiers
from ssd_fx.passes.costs import Machine
from ssd_fx.passes.place import LOAD_MARGIN, everything, floor, place
from ssd_fx.passes.refine import TOLERANCE, Solution, better, kept_bytes, refine, rest
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
    """No choices meet a budget of `asked` bytes; `least` is the smallest that can be met, `why` ends the message."""

    def __init__(self, asked: float, least: int, why: str = "") -> None:
        super().__init__(asked, least, why)  # what it can be made again from
        self.asked, self.least, self.why = asked, least, why

    def __str__(self) -> str:
        return f"a budget of {int(self.asked)} B cannot be met; the least that can is {self.least} B{self.why}"


def solve(
    step: Step,
    machine: Machine,
    *,
    limit: float,
    share_bytes: float,
    prefetch: float = float("inf"),
    may_rest: bool = False,
) -> Solution:
    """The best choices found with memory never above `limit` bytes and at most `share_bytes` kept of what may leave.

    `may_rest`: what the limit has room for may be offloaded in name only, beyond the share: stored last and taken back
    first, so that its write is cancelled.

    Raises:
        BudgetError: no choices meet `limit`; the message says the least that can be met.
    """
    least = floor(step)
    if limit < least:
        raise BudgetError(limit, least)
    search = _Search(step, machine, limit, share_bytes, prefetch, may_rest)
    plain = None
    if step.host_budget and all(item.tier != "host" for item in step.items):  # never slower than without
        bounds = {"limit": limit, "share_bytes": share_bytes, "prefetch": prefetch}
        plain = solve(replace(step, host_budget=0), machine, **bounds, may_rest=may_rest)
        search.solution(plain.choices)
    search.families()
    if search.best is None:  # what is handed over was held for longer than the placement reckoned with
        search.wait_for_writes()
    if not search.is_cheapest():
        search.improve()
    if search.best is None:
        raise BudgetError(limit, least)
    if search.is_cheapest():
        return search.best
    search.vary()
    best, effort = search.best, _effort(step) // max(POOL, len(search.pool))
    for start in search.pool:
        refined = refine(step, machine, start, limit=limit, share_bytes=share_bytes, effort=effort, may_rest=may_rest)
        best = refined if better(refined.outcome, best.outcome) else best
    return plain if plain is not None and better(plain.outcome, best.outcome) else best


Moves = Callable[[tuple[Choice, ...]], Iterator[tuple[Choice, ...]]]


class _Search:
    def __init__(
        self, step: Step, machine: Machine, limit: float, share_bytes: float, prefetch: float, may_rest: bool
    ) -> None:
        self.may_rest = may_rest
        self.step, self.machine, self.limit = step, machine, limit
        self.share_bytes, self.prefetch = share_bytes, prefetch
        self.best: Solution | None = None
        self.asked: tuple[Choice, ...] = ()  # what led to the best: keeps that rest are keeps here
        self.pool: list[Solution] = []  # the best so far, fastest first
        self.left = _effort(step) // (2 if step.host_budget else 1)
        self.waits = False  # whether every release waits for its write
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

    def wait_for_writes(self) -> None:
        """Look again with releases that wait for their writes: so memory is what was placed, however late they are."""
        self.waits = True
        self.seen.clear()
        self.families()

    def is_cheapest(self) -> bool:
        """Whether the best found costs no stall and nothing recomputed, and moves hardly more bytes than must be."""
        if self.best is None:
            return False
        items, outcome = self.step.items, self.best.outcome
        free = sum(item.nbytes for item in items if len(item.choices) > 1)
        must = max(everything(self.step) - self.limit, free - self.share_bytes, 0)
        stalled = outcome.stall_s > TOLERANCE * outcome.seconds or Choice.RECOMPUTE in self.best.choices
        return not stalled and outcome.written <= 1.01 * max(must - self.step.host_budget, 0)

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
        over = self._fixed_bytes(choices) if self.may_rest else kept_bytes(self.step, choices)
        if over <= self.share_bytes:
            found = self._placed(choices)
        self.seen[choices] = found
        if found is not None:
            self.pool = sorted([*self.pool, found], key=lambda s: s.outcome.seconds)[:POOL]
        if found is not None and (self.best is None or better(found.outcome, self.best.outcome)):
            self.best, self.asked = found, choices
        return found

    def _fixed_bytes(self, choices: tuple[Choice, ...]) -> int:
        """Bytes that are kept of what may leave and cannot be offloaded."""
        pairs = zip(self.step.items, choices, strict=True)
        return sum(
            item.nbytes
            for item, c in pairs
            if c is Choice.KEEP and len(item.choices) > 1 and Choice.OFFLOAD not in item.choices
        )

    def _placed(self, choices: tuple[Choice, ...]) -> Solution | None:
        return tiers.filled(self.step, self.machine, choices, partial(self._placed_with, choices))

    def vary(self) -> None:
        """Adds to the pool the best choices with other items in host memory."""
        if self.best is not None and self.step.host_budget:
            self.left, choices = _effort(self.step) // 2, self.best.choices
            play = partial(self._placed_with, choices)
            self.pool += tiers.varied(self.step, self.machine, choices, play, lambda: self.left > 0)

    def _placed_with(self, choices: tuple[Choice, ...], hosted: tiers.Hosted) -> Solution | None:
        """Placed as if nothing stalled, then again with the starts that the simulation gave; the better of the two."""
        best, starts = None, None
        resting = self._resting(choices)
        told = tuple(Choice.OFFLOAD if i in resting else c for i, c in enumerate(choices))
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
                hosted=hosted,
            )
            if transfers is None:
                break
            if self.waits:
                transfers = {i: replace(t, block=True) for i, t in transfers.items()}
            transfers |= {i: rest(self.step) for i in resting}
            outcome = simulate(self.step, told, transfers, self.machine)
            if outcome.peak <= self.limit and (best is None or better(outcome, best.outcome)):
                best = Solution(told, transfers, outcome)
            if outcome.stall_s <= TOLERANCE * outcome.seconds:
                break
            starts = outcome.starts
        return best

    def _resting(self, choices: tuple[Choice, ...]) -> set[int]:
        """What is to be kept beyond the share, the smallest first: offloaded in name, it rests in memory."""
        items = self.step.items
        kept = [i for i, c in enumerate(choices) if c is Choice.KEEP and Choice.OFFLOAD in items[i].choices]
        resting = {i for i in kept if Choice.KEEP not in items[i].choices}
        kept = [i for i in kept if i not in resting]
        over = sum(items[i].nbytes for i in kept) + self._fixed_bytes(choices) - self.share_bytes
        for i in sorted(kept, key=lambda i: items[i].nbytes):
            if over <= 0:
                break
            resting.add(i)
            over -= items[i].nbytes
        return resting

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
        self._descend(self.asked, (self._singles, self._pairs))
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
        choices = list(self.asked)
        free = [i for i in range(len(choices)) if len(self._allowed(i)) > 1]
        for i in random.sample(free, min(len(free), random.randint(2, 4))):
            choices[i] = random.choice(self._others(i, choices[i]))
        return tuple(choices)

    def _allowed(self, i: int) -> list[Choice]:
        """What may be asked of an item: what may be offloaded may also rest, which is asked for as a keep."""
        choices = self.step.items[i].choices
        rests = {Choice.KEEP} if self.may_rest and Choice.OFFLOAD in choices else set()
        return sorted(choices | rests, key=lambda c: c.value)

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
