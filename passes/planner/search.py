"""The search: how much to recompute, how much of the rest to offload, then other choices for single items.

    recompute   the k items that cost least per byte; a closed form says about which k, and its neighbours are tried
    offload     of the others, in some order, as few as the budget asks
    keep        the rest

The best plan is one of these or near one. A checkpoint per layer is one of these: all but what lies between layers is
recomputed. A replay says what the placement of choices costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from ssd_fx.passes.axis import Choice, Item, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner import host_tier
from ssd_fx.passes.planner.bound import least_bytes, lower_bound
from ssd_fx.passes.planner.compare import EQUAL, TOLERANCE, better, fits, loses_time, stalls
from ssd_fx.passes.planner.place import LOAD_MARGIN, Placer, free_bytes, least_head
from ssd_fx.passes.planner.replay import first_uses, own_s, replay
from ssd_fx.passes.planner.segments import boundaries
from ssd_fx.passes.schedule import Replay, Schedule

# Replays, in the time that one takes; each visits all operators and items of the step. So the search is a constant
# part of compiling, which is in proportion to the size of the step too. Small steps, which cost nothing, get more.
TRIALS, QUICK_TRIALS = 200, 50
LEAST_EFFORT = 120_000
ENOUGH = 2e-3  # the share of a step that is not searched for: the bound on all plans is as near
EXHAUSTIVE = 1024  # up to so many choices are all tried
# Placements of the same choices, each with the starts that the one before led to; the last leaves most memory free.
MARGINS = (LOAD_MARGIN, LOAD_MARGIN, 1.0)
STRIDES = (1, 2, 3, 4, 8)  # checkpoints at every boundary between layers, at every second one, and so on


Choices = tuple[Choice, ...]
Order = Callable[[int], tuple[float, ...]]  # of items, as a key to sort by


class Search:
    def __init__(
        self, step: Step, machine: Machine, limit: float, share_bytes: float, prefetch: float, *, quick: bool = False
    ) -> None:
        self.step, self.machine, self.limit = step, machine, limit
        self.share_bytes, self.prefetch = share_bytes, prefetch
        self.best: Replay | None = None
        self.effort = effort_of(step, quick=quick) // (2 if step.host_budget else 1)
        self.left = self.effort
        self.waits = False  # whether every release waits for its write
        self.seen: dict[Choices, Replay | None] = {}
        self.allowed = [_allowed(item) for item in step.items]
        self.preferred = [_preferred(item) for item in step.items]
        self.must = least_bytes(step, limit, share_bytes)
        self.enough_s = (1 + ENOUGH) * lower_bound(step, machine, limit, share_bytes)

    @property
    def is_small(self) -> bool:
        """Whether every choice can be tried."""
        return math.prod(len(a) for a in self.allowed) <= EXHAUSTIVE

    def families(self) -> None:
        """Find how much to recompute, in every order of recomputing; there, try the other orders of offloading."""
        first, *others = itertools.product(self._orders(), (False, True))
        tried: list[tuple[float, list[int]]] = []
        for between in self._layers():
            self._shortest(set(between), *first)
        for cheap in self._again():
            if self._is_spent(1 / 4):
                break
            found = self._amount(cheap, *first)
            tried += [(seconds, cheap[:count]) for count, seconds in found.items()]
        for (_, again), (key, defer) in itertools.product(sorted(tried, key=lambda t: t[0]), others):
            if self._is_spent(1 / 8):
                break
            if self._may_gain(again):
                self._shortest(set(again), key, defer)

    def _is_spent(self, left: float) -> bool:
        """Whether nothing is to be gained any more, or no more than the share `left` of the effort is left."""
        return self.best is not None and (self.left <= left * self.effort or self.is_cheapest())

    def _again(self) -> Iterator[list[int]]:
        """Orders of what may be recomputed, cheapest per byte first.

        Among equal ones the last layers come first, whose transfers would have least time; or the first layers, which
        are away longest. Then what lies between layers stays: to recompute it too would chain the layers. Then whole
        layers, the first ones first. There may be no memory for the chains of what is dear beside those of what is
        cheap, so there what is dear is let in first.
        """
        items = self.step.items
        able = [i for i, item in enumerate(items) if Choice.RECOMPUTE in item.choices]
        cheap = sorted(able, key=lambda i: (self._again_per_byte(i), items[i].produced))
        first = self._that_fit(cheap)
        yield first
        if not able:
            return
        yield self._that_fit(sorted(able, key=lambda i: (self._again_per_byte(i), -items[i].produced)))
        layers = list(self._layers())
        within = [i for i in cheap if not layers or i in layers[0]]
        if layers:
            yield self._that_fit(within)
        yield sorted(self._that_fit(within[::-1]), key=lambda i: items[i].produced)
        for each in layers[1:]:
            yield [i for i in first if i in each]

    def _layers(self) -> Iterator[frozenset[int]]:
        """What checkpoints recompute: all but what lies between layers, between every second one, and so on."""
        able = frozenset(i for i, item in enumerate(self.step.items) if Choice.RECOMPUTE in item.choices)
        between = boundaries(self.step) if able else []
        for stride in STRIDES[: len(between)]:
            yield able.difference(*between[::stride])

    def _that_fit(self, order: list[int]) -> list[int]:
        """The items of an order that can be recomputed together with those before, within the limit.

        An item may need so many others, and so early, that there is no memory for them: the sum of all layers before.
        """
        fit: list[int] = []
        least = self.left - self.effort // 8

        def add(more: list[int]) -> None:
            self.left -= len(self.step.items)
            if self.left < least:
                return  # what is left is not looked at one by one
            choices = self._with({*fit, *more}, self._movable({*fit, *more}), len(self.step.items), False)
            if free_bytes(self.step, choices, self.limit).min(initial=0) >= 0:
                fit.extend(more)
            elif len(more) > 1:
                add(more[: len(more) // 2])
                add(more[len(more) // 2 :])

        add(order)
        return fit

    def _movable(self, recomputed: AbstractSet[int]) -> list[int]:
        """What can be offloaded beside what is recomputed."""
        items = enumerate(self.step.items)
        return [i for i, item in items if Choice.OFFLOAD in item.choices and i not in recomputed]

    def _amount(self, cheap: list[int], key: Order, defer: bool) -> dict[int, float]:
        """The seconds of the step by how many of `cheap` are recomputed, for the numbers that were tried.

        These are what the closed form says, none, all, parts, and ever nearer neighbours of the best.
        """
        found: dict[int, float] = {}

        def seconds(count: int) -> float:
            if count not in found and 0 <= count <= len(cheap):
                gains = self._may_gain(cheap[:count])
                shortest = self._shortest(set(cheap[:count]), key, defer) if gains else None
                found[count] = shortest.seconds if shortest else math.inf
            return found.get(count, math.inf)

        quarters = (len(cheap) * part // 4 for part in (0, 4, 3, 2, 1))
        at = min((self._closed_form(cheap), *quarters), key=seconds)
        width = max(len(cheap) // 8, 1)
        while width and not self._is_spent(1 / 4):
            nearest = min((at, at - width, at + width), key=seconds)
            at, width = (nearest, width) if nearest != at else (at, width // 2)
        return found

    def _closed_form(self, cheap: Sequence[int]) -> int:
        """How many to recompute, if the lanes hide what they can in the forward and the backward, and no more."""
        items, forward = self.step.items, self.step.forward
        forward_s, backward_s = sum(self.step.seconds[:forward]), sum(self.step.seconds[forward:])
        lanes = self.machine.lanes("host") if self.step.host_budget else self.machine
        again_s = np.cumsum([0.0, *(self.step.fair_again_s[i] for i in cheap)])
        left = np.maximum(0.0, self.must - np.cumsum([0.0, *(items[i].nbytes for i in cheap)]))
        write_s = np.maximum(0.0, left / lanes.write_bw - forward_s)
        read_s = np.maximum(0.0, left / lanes.read_bw - backward_s - again_s)
        return int(np.argmin(again_s + 2 * lanes.drag_s_per_byte * left + write_s + read_s))

    def _may_gain(self, recomputed: Sequence[int]) -> bool:
        """Whether the step can be faster than the best even with nothing to wait for."""
        seconds = sum(self.step.seconds) + self.step.again_s(recomputed)
        return self.best is None or seconds <= (1 + TOLERANCE) * self.best.seconds

    def wait_for_writes(self) -> None:
        """Look again with releases that wait for their writes, so that memory is as placed however late they are."""
        self.waits = True
        self.seen.clear()
        self.left = self.effort
        self.families()

    def is_cheapest(self) -> bool:
        """Whether no plan can be much better: the best offloads hardly more bytes than must go, and takes hardly
        longer than the lower bound, or neither stalls nor recomputes where no transfer costs more than recomputing."""
        if self.best is None:
            return False
        fast = self.best.seconds <= self.enough_s or not (loses_time(self.best) or self._dear_transfers())
        gone = sum(self.step.nbytes[i] for i, trip in self.best.schedule.items() if trip.tier == "ssd")
        return fast and gone <= 1.01 * max(self.must - self.step.host_budget, 0)

    def _dear_transfers(self) -> bool:
        """Whether a transfer of the best takes more from the compute lane than recomputing its item would."""
        assert self.best is not None
        own, again_s = self.step.once(own_s, self.machine), self.step.own_again_s  # own: at the store, and at the load
        return any(again_s[i] < 2 * own[trip.tier][i] for i, trip in self.best.schedule.items())

    def _orders(self) -> Iterator[Order]:
        items = self.step.items
        yield lambda i: (items[i].produced - items[i].first_use, -items[i].nbytes, i)  # longest idle first
        yield lambda i: ((items[i].produced - items[i].first_use) * items[i].nbytes, i)  # most idle bytes first
        yield lambda i: (items[i].last_use, i)  # soonest free to go

    def _shortest(self, recomputed: set[int], key: Order, defer: bool) -> Replay | None:
        """Offload the shortest head of an order that meets the budget: more offloaded is less memory."""
        order = sorted(self._movable(recomputed), key=key)

        def offloaded(count: int) -> Replay | None:
            return self.solution(self._with(recomputed, order, count, defer))

        low = least_head(self.step, self._with(recomputed, order, 0, False), order, self.limit)
        high, more = low, 1
        while high < len(order) and offloaded(high) is None:
            low, high, more = high + 1, min(high + more, len(order)), 2 * more
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if offloaded(middle) is not None else (middle + 1, high)
        found = offloaded(low)
        return found and self._not_in_vain(found, self._with(recomputed, order, low, defer))

    def _not_in_vain(self, found: Replay, choices: Choices) -> Replay:
        """The better of a replay and the one that keeps what it recomputes though there is memory for it.

        What is dearest per byte is kept first. Of the logits nothing is gained: the loss reads them at the end of the
        forward, and its gradient at the begin of the backward.
        """
        items = self.step.items
        free, firsts = self.limit - np.array(found.memory), first_uses(self.step, choices)
        room = self.share_bytes - self.step.kept_bytes(choices)
        kept = set[int]()
        recomputed = (i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE)
        for i in sorted(recomputed, key=self._again_per_byte, reverse=True):
            gone = free[items[i].last_use + 1 : firsts[i]]
            if Choice.KEEP in items[i].choices and gone.size and items[i].nbytes <= min(room, gone.min()):
                gone -= items[i].nbytes
                room -= items[i].nbytes
                kept.add(i)
        if not kept:
            return found
        other = self.solution(tuple(Choice.KEEP if i in kept else choice for i, choice in enumerate(choices)))
        return other if other is not None and better(other, found) else found

    def _again_per_byte(self, i: int) -> float:
        """Seconds to recompute an item, per byte; a size that only the run knows is 0."""
        return round(self.step.fair_again_s[i] / max(self.step.items[i].nbytes, 1), 15)

    def _with(self, recomputed: set[int], order: list[int], count: int, defer: bool) -> Choices:
        """Offload the first `count` of `order`. With `defer`, the next ones are deferred until the share is met."""
        choices = self.preferred.copy()
        for i in recomputed:
            choices[i] = Choice.RECOMPUTE
        for i in order[:count]:
            choices[i] = Choice.OFFLOAD
        if defer:
            self._defer(choices, order[count:])
        return tuple(choices)

    def _defer(self, choices: list[Choice], others: list[int]) -> None:
        """Defer the first of `others` until the share is met, and all of them that are offloaded."""
        over = self.step.kept_bytes(choices) - self.share_bytes
        for i in others:
            if over > 0 or choices[i] is Choice.OFFLOAD:
                if choices[i] is Choice.KEEP:
                    over -= self.step.nbytes[i]
                choices[i] = Choice.DEFER

    def solution(self, choices: Choices) -> Replay | None:
        """The choices placed and replayed; None where the budget is not met. The best is remembered."""
        if choices in self.seen:
            self.left -= 1  # `better` is not transitive: without this a circle of ever better ones would not end
            return self.seen[choices]
        found = None
        self.left -= len(choices)  # choices that are not placed take time too
        if self.step.kept_bytes(choices) <= self.share_bytes:
            found = self._filled(choices)
        self.seen[choices] = found
        if found is not None and (self.best is None or better(found, self.best)):
            self.best = found
        return found

    def least_written(self) -> Replay:
        """Of all that was found about as fast as the best, what writes least."""
        assert self.best is not None
        enough_s = (1 + EQUAL) * self.best.seconds
        near = (found for found in self.seen.values() if found is not None and found.seconds <= enough_s)
        return min((self.best, *near), key=lambda found: (found.written, found.seconds))

    def _filled(self, choices: Choices) -> Replay | None:
        """The best of three: in host memory is only what is bound to be there, or what else fits, in two orders."""
        best = self._placed(choices, host_tier.bound(self.step, choices))
        if not self.step.host_budget or best is None:
            return best
        for hosted in host_tier.fillings(self.step, choices, best.waits):
            found = self._placed(choices, hosted)
            if found is not None and better(found, best):
                best = found
            if not stalls(best):
                break  # others hardly write less
        return best

    def exchange_hosted(self) -> None:
        """Give the best choices other items in host memory, one by one, as long as each makes the step better."""
        if not self.step.host_budget:
            return
        self.left = self.effort // 2
        better_one = self.best
        while better_one is not None:
            now = self.best = better_one
            tries = (self._placed(now.choices, h) for h in host_tier.exchanges(now) if self.left > 0)
            better_one = next((found for found in tries if found is not None and better(found, now)), None)

    def _placed(self, choices: Sequence[Choice], hosted: host_tier.Hosted) -> Replay | None:
        """The best of some placements: one as if nothing stalled, then some with the times of the one before."""
        step, best, played = self.step, None, None
        placer = Placer(step, choices, self.machine, self.limit, self.prefetch, hosted)
        for margin in MARGINS:
            schedule = placer.place(played, margin)
            if schedule is None:
                break
            if self.waits:
                schedule = schedule.edited(lambda _, trip: trip.moved(block=True), step.items)
            played = self._played(choices, schedule)
            if played.idle_lane:  # the order was made for other times; storing at once leaves no lane idle
                schedule = schedule.edited(lambda i, trip: trip.moved(store=step.produced[i]), step.items)
                played = self._played(choices, schedule)
            if fits(played, self.limit) and (best is None or better(played, best)):
                best = played
            if not stalls(played):
                break
        return best

    def _played(self, choices: Sequence[Choice], schedule: Schedule) -> Replay:
        self.left -= size(self.step)
        return replay(self.step, choices, schedule, self.machine)

    def improve(self) -> None:
        """Try every choice of a small step; of others, change single items while the step gets better."""
        if self.is_small:
            for choices in itertools.product(*self.allowed):
                if self.left > 0:
                    self.solution(choices)
        else:
            self._descend()

    def _descend(self) -> None:
        """From the best, change to better neighbours: over all items again and again, until none is better."""
        assert self.best is not None
        choices = tuple(self.best.choices)
        now = self.solution(choices)
        assert now is not None
        unchanged = 0
        for i in itertools.cycle(self._dearest_first(now)):
            unchanged += 1
            for other in self.allowed[i]:
                neighbour = (*choices[:i], other, *choices[i + 1 :])
                found = self.solution(neighbour) if other is not choices[i] else None
                if found is not None and better(found, now):
                    choices, now, unchanged = neighbour, found, 0
            if self.left <= 0 or unchanged >= len(choices):
                return

    def _dearest_first(self, now: Replay) -> list[int]:
        """The items by what they cost in the step: waits, and seconds to recompute them."""
        items, waits = self.step.items, now.waits

        def cost_s(i: int) -> float:
            return waits.get(i, 0.0) + (items[i].recompute_s if now.choices[i] is Choice.RECOMPUTE else 0.0)

        return sorted(range(len(items)), key=lambda i: (-cost_s(i), i))


def _allowed(item: Item) -> list[Choice]:
    choices = sorted(item.choices, key=lambda c: c.value)
    return [*choices, Choice.DEFER] if Choice.OFFLOAD in choices else choices


def _preferred(item: Item) -> Choice:
    return next(c for c in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE) if c in item.choices)


def size(step: Step) -> int:
    """What replaying the step costs, counted in operators."""
    return len(step.seconds) + 4 * len(step.items)


def effort_of(step: Step, quick: bool = False) -> int:
    return max(LEAST_EFFORT, (QUICK_TRIALS if quick else TRIALS) * size(step))
