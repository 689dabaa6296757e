"""The search: families of choices, then other choices for single items.

In a family the k items that are cheapest per byte are recomputed, and of the others as many are offloaded, in some
order, as the budget asks. The best plan is in a family or near one. The simulator says what the placement of choices
costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ssd_fx.passes.cost.machine import TIERS, Machine
from ssd_fx.passes.planner import host_tier
from ssd_fx.passes.planner.bound import least_bytes, lower_bound
from ssd_fx.passes.planner.items import Choice, Item, Step, Transfer
from ssd_fx.passes.planner.place import LOAD_MARGIN, place
from ssd_fx.passes.planner.simulate import Outcome, simulate
from ssd_fx.passes.planner.solution import TOLERANCE, Solution, better, fits, kept_bytes, size

# Operators and items visited over all trials of the search; a million takes one to two seconds of Python. In proportion
# to the size of the step, as the time to compile its graphs is; small steps, which cost nothing, get more.
TRIALS = 40
LEAST_EFFORT = 60_000
ENOUGH = 2e-3  # the share of a step that is not searched for: the bound on all plans is as near
EXHAUSTIVE = 1024  # up to so many choices are all tried
# Placements of the same choices, each with the starts that the one before led to; the last leaves most memory free.
MARGINS = (LOAD_MARGIN, LOAD_MARGIN, 1.0)


Wish = tuple[Choice, bool]  # what the search asks for: a choice for an item, and whether it is deferred (see `place`)
Wishes = tuple[Wish, ...]
Order = Callable[[int], tuple[float, ...]]  # of items, as a key to sort by


class Search:
    def __init__(self, step: Step, machine: Machine, limit: float, share_bytes: float, prefetch: float) -> None:
        self.step, self.machine, self.limit = step, machine, limit
        self.share_bytes, self.prefetch = share_bytes, prefetch
        self.best: Solution | None = None
        self.asked: Wishes = ()  # what led to the best
        self.left = effort_of(step) // (2 if step.host_budget else 1)
        self.waits = False  # whether every release waits for its write
        self.seen: dict[Wishes, Solution | None] = {}
        self.allowed = [_allowed(item) for item in step.items]
        self.must = least_bytes(step, limit, share_bytes)
        self.enough_s = (1 + ENOUGH) * lower_bound(step, machine, limit, share_bytes)

    def families(self) -> None:
        """Recompute the first k by price per byte; of the rest offload as few as the budget allows, in every order.

        Every k is looked at in one order first; that says which of them are worth the other orders.
        """
        items = self.step.items
        cheap = sorted(
            (i for i, item in enumerate(items) if Choice.RECOMPUTE in item.choices),
            key=lambda i: items[i].recompute_s / max(items[i].nbytes, 1),  # a size that only the run knows may be 0
        )
        first, *others = itertools.product(self._orders(), (False, True))
        found: list[tuple[float, int]] = []
        for count in _steps(len(cheap)):
            spent = self.left <= 0 and self.best is not None
            if spent or self.is_cheapest() or not self._may_gain(cheap[:count]):
                break
            shortest = self._shortest(set(cheap[:count]), *first)
            found.append((shortest.outcome.seconds if shortest else math.inf, count))
        least = self.left // 2
        for (_, count), (key, defer) in itertools.product(sorted(found), others):
            if self.is_cheapest() or (self.best is not None and self.left < least):
                return
            if self._may_gain(cheap[:count]):
                self._shortest(set(cheap[:count]), key, defer)

    def _may_gain(self, recomputed: Sequence[int]) -> bool:
        """Whether the step can be faster than the best even with nothing to wait for."""
        items = self.step.items
        seconds = sum(self.step.seconds) + sum(items[i].recompute_s for i in recomputed)
        return self.best is None or seconds <= (1 + TOLERANCE) * self.best.outcome.seconds

    def wait_for_writes(self) -> None:
        """Look again with releases that wait for their writes, so that memory is as placed however late they are."""
        self.waits = True
        self.seen.clear()
        self.families()

    def is_cheapest(self) -> bool:
        """Whether no plan can be much better: the best offloads hardly more bytes than must go, and takes hardly
        longer than the lower bound, or neither stalls nor recomputes where no transfer costs more than recomputing."""
        if self.best is None:
            return False
        outcome = self.best.outcome
        fast = outcome.seconds <= self.enough_s or not (self.best.loses_time or self._dear_transfers())
        gone = sum(self.step.items[i].nbytes for i, t in self.best.transfers.items() if t.tier == "ssd")
        return fast and gone <= 1.01 * max(self.must - self.step.host_budget, 0)

    def _dear_transfers(self) -> bool:
        """Whether a transfer of the best takes more from the compute lane than recomputing its item would."""
        assert self.best is not None
        own = {tier: self.step.seconds_of(self.machine, tier).own for tier in TIERS}  # at the store, and at the load
        items = self.step.items
        return any(items[i].recompute_s < 2 * own[t.tier][i] for i, t in self.best.transfers.items())

    def _orders(self) -> Iterator[Order]:
        items = self.step.items
        yield lambda i: (items[i].produced - items[i].first_use, -items[i].nbytes, i)  # longest idle first
        yield lambda i: ((items[i].produced - items[i].first_use) * items[i].nbytes, i)  # most idle bytes first
        yield lambda i: (items[i].last_use, i)  # soonest free to go

    def _shortest(self, recomputed: set[int], key: Order, defer: bool) -> Solution | None:
        """Offload the shortest head of an order that meets the budget, by bisection: more offloaded is less memory."""
        movable = [i for i, item in enumerate(self.step.items) if Choice.OFFLOAD in item.choices]
        order = sorted((i for i in movable if i not in recomputed), key=key)
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if self.solution(self._with(recomputed, order, middle, defer)) is not None:
                high = middle
            else:
                low = middle + 1
        return self.solution(self._with(recomputed, order, low, defer))

    def _with(self, recomputed: set[int], order: list[int], count: int, defer: bool) -> Wishes:
        """Offload the first `count` of `order`. With `defer`, the next ones are deferred until the share is met."""
        wishes = [_preferred(item) for item in self.step.items]
        for i in recomputed:
            wishes[i] = (Choice.RECOMPUTE, False)
        for i in order[:count]:
            wishes[i] = (Choice.OFFLOAD, False)
        if defer:
            self._defer(wishes, order[count:])
        return tuple(wishes)

    def _defer(self, wishes: list[Wish], others: list[int]) -> None:
        """Defer the first of `others` until the share is met, and all of them that are offloaded."""
        over = kept_bytes(self.step, _choices(wishes)) - self.share_bytes
        for i in others:
            choice, _ = wishes[i]
            if over > 0 or choice is Choice.OFFLOAD:
                wishes[i] = (Choice.OFFLOAD, True)
                if choice is Choice.KEEP:
                    over -= self.step.items[i].nbytes

    def solution(self, wishes: Wishes) -> Solution | None:
        """The wishes placed and simulated; None where the budget is not met. The best is remembered."""
        if wishes in self.seen:
            self.left -= 1  # `better` is not transitive: without this a circle of ever better ones would not end
            return self.seen[wishes]
        found = None
        self.left -= len(wishes)  # wishes that are not placed take time too
        if kept_bytes(self.step, _choices(wishes)) <= self.share_bytes:
            play = partial(self._placed_with, wishes)
            found = host_tier.filled(self.step, _choices(wishes), play)
        self.seen[wishes] = found
        if found is not None and (self.best is None or better(found.outcome, self.best.outcome)):
            self.best, self.asked = found, wishes
        return found

    def exchange_hosted(self) -> None:
        """Give the best choices other items in host memory, one by one."""
        assert self.best is not None
        if self.step.host_budget:
            self.left = effort_of(self.step) // 2
            play = partial(self._placed_with, self.asked)
            self.best = host_tier.exchanged(self.step, self.best, play, lambda: self.left > 0)

    def _placed_with(self, wishes: Wishes, hosted: host_tier.Hosted) -> Solution | None:
        """The best of some placements: one as if nothing stalled, then some with the simulated times."""
        choices, deferred = _choices(wishes), {i for i, (_, is_deferred) in enumerate(wishes) if is_deferred}
        best: Solution | None = None
        played: Outcome | None = None
        for margin in MARGINS:
            transfers = place(
                self.step,
                choices,
                self.machine,
                limit=self.limit,
                prefetch=self.prefetch,
                played=played,
                margin=margin,
                deferred=deferred,
                hosted=hosted,
            )
            if transfers is None:
                break
            if self.waits:
                transfers = {i: replace(t, block=True) for i, t in transfers.items()}
            played = self._played(choices, transfers)
            if played.idle_lane:  # the order was made for other times; storing at once leaves no lane idle
                transfers = {i: replace(t, store_after=self.step.items[i].produced) for i, t in transfers.items()}
                played = self._played(choices, transfers)
            if fits(self.step, played, self.limit) and (best is None or better(played, best.outcome)):
                best = Solution(choices, transfers, played)
            if played.stall_s <= TOLERANCE * played.seconds:
                break
        return best

    def _played(self, choices: tuple[Choice, ...], transfers: Mapping[int, Transfer]) -> Outcome:
        self.left -= size(self.step)
        return simulate(self.step, choices, transfers, self.machine)

    def improve(self) -> None:
        """Try every choice of a small step; of others, change single items while the step gets better."""
        if math.prod(len(a) for a in self.allowed) <= EXHAUSTIVE:
            for wishes in itertools.product(*self.allowed):
                if self.left > 0:
                    self.solution(wishes)
        else:
            self._descend()

    def _descend(self) -> None:
        """From the best, change to the first better neighbour while there is one."""
        wishes = self.asked
        now = self.solution(wishes)
        assert now is not None
        moved = True
        while moved and self.left > 0:
            moved = False
            for neighbour in self._neighbours(wishes):
                found = self.solution(neighbour)
                if found is not None and better(found.outcome, now.outcome):
                    wishes, now, moved = neighbour, found, True
                    break
                if self.left <= 0:
                    break

    def _neighbours(self, wishes: Wishes) -> Iterator[Wishes]:
        """The wishes with another one for a single item."""
        for i, wish in enumerate(wishes):
            for other in self.allowed[i]:
                if other != wish:
                    yield (*wishes[:i], other, *wishes[i + 1 :])


def _allowed(item: Item) -> list[Wish]:
    wishes = [(choice, False) for choice in sorted(item.choices, key=lambda c: c.value)]
    return [*wishes, (Choice.OFFLOAD, True)] if Choice.OFFLOAD in item.choices else wishes


def _preferred(item: Item) -> Wish:
    return next(c for c in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE) if c in item.choices), False


def _choices(wishes: Sequence[Wish]) -> tuple[Choice, ...]:
    return tuple(choice for choice, _ in wishes)


def effort_of(step: Step) -> int:
    return max(LEAST_EFFORT, TRIALS * size(step))


def _steps(count: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, ... and `count`: about even ratios."""
    steps, at = {0, count}, 1.0
    while at < count:
        steps.add(int(at))
        at = at + 1 if at < 4 else at * 1.3
    return sorted(steps)
