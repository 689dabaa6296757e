"""The last part of the search for small steps: random changes of one or two items, worse ones taken while it is warm.

    cost    seconds, and a penalty for what does not fit: a plan beyond the limit is a way between two plans within it

Moves of single transfers end where only two changes together help, or where the way there costs time. A step of a
dozen items is played thousands of times in half a second; a large one has too many places for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.refine import Draft, Solution, Window, better, fits, kept_bytes, with_strict
from ssd_fx.passes.planner.simulate import Choice, Item, Step, Transfer, first_uses, simulate

WARM = 0.05  # share of the step's time that a change may cost at first, about
OVER = 20.0  # seconds per second for what is over the limit or the share by all of it
HELD_BACK = 0.2  # likewise, for a plan that holds something back
MOVED = 0.4  # probability of every node of a changed transfer to move


def anneal(
    step: Step,
    machine: Machine,
    start: Solution,
    *,
    limit: float,
    share_bytes: float,
    trials: int,
    seed: int,
    prefetch: float = math.inf,
) -> Solution:
    """The best solution met on a random walk of `trials` changes from `start`; the same on every machine."""
    window = Window.of(step, start, prefetch)
    best = _Walk(step, machine, start, limit, share_bytes, Random(seed), window).run(trials)
    return with_strict(step, start, best, limit)


@dataclass
class _Walk:
    step: Step
    machine: Machine
    best: Solution
    limit: float
    share_bytes: float
    random: Random
    window: Window

    def run(self, trials: int) -> Solution:
        choices, transfers = self.best.choices, self.best.transfers
        seconds = now = self.best.outcome.seconds
        for trial in range(trials):
            heat = WARM * seconds * (1 - trial / trials) ** 2
            draft = self._changed((choices, transfers))
            cost = self._cost(draft)
            if cost < now or self.random.random() < math.exp((now - cost) / heat):
                (choices, transfers), now = draft, cost
        return self.best

    def _changed(self, draft: Draft) -> Draft:
        choices, transfers = list(draft[0]), dict(draft[1])
        for _ in range(self.random.choice((1, 1, 2))):
            i = self.random.randrange(len(choices))
            item = self.step.items[i]
            choices[i] = self.random.choice(sorted(item.choices, key=lambda c: c.value))
            old = transfers.pop(i, None)
            if choices[i] is Choice.OFFLOAD:
                transfers[i] = self._transfer(item, old)
        return tuple(choices), transfers

    def _transfer(self, item: Item, old: Transfer | None) -> Transfer:
        random, forward = self.random, self.step.forward

        def moves() -> bool:
            return old is None or random.random() < MOVED

        store = random.randrange(item.produced, forward) if moves() or old is None else old.store_after
        least = max(store, item.last_use)
        release = random.randrange(least, forward) if moves() or old is None else max(old.release_after, least)
        block = random.random() < 0.5 if moves() or old is None else old.block
        load = random.randint(forward, item.first_use) if moves() or old is None else old.load_before
        return Transfer(store, release, block, load, tier=old.tier if old else item.tier or "ssd")

    def _cost(self, draft: Draft) -> float:
        """Seconds with penalties; remembers the best that fits."""
        choices, transfers = draft
        firsts = first_uses(self.step, choices)
        if any(t.load_before > firsts[i] for i, t in transfers.items()):
            return math.inf
        outcome, kept = simulate(self.step, choices, transfers, self.machine), kept_bytes(self.step, choices)
        if outcome.host_peak > self.step.host_budget:
            return math.inf
        if fits(self.step, outcome, self.limit) and kept <= self.share_bytes:
            found = Solution(choices, transfers, outcome)
            if not self.window.holds(self.step, found):
                return math.inf
            if better(outcome, self.best.outcome):
                self.best = found
            return outcome.seconds
        over = max(0.0, outcome.peak / self.limit - 1) if self.limit else math.inf
        over += max(0.0, kept - self.share_bytes) / sum(item.nbytes for item in self.step.items)
        return outcome.seconds + self.best.outcome.seconds * (OVER * over + HELD_BACK * outcome.held_back)
