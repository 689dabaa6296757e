"""The search: how much to recompute, how much of the rest to offload, then other choices for single items.

    recompute   the k items that cost least per byte; a closed form estimates k, and numbers near it are tried
    offload     of the others, in some order, as few as the budget asks
    keep        the rest

The best plan is one of these or near one. A checkpoint per layer is one of these: all but the items between layers are
recomputed. The cost of choices is that of the replay of their placement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

import numpy as np

from ssd_fx.passes.axis import Choice, Item, Step
from ssd_fx.passes.planner.bound import bound_with, least_bytes, lower_bound
from ssd_fx.passes.planner.compare import EQUAL, TOLERANCE, better, stalls
from ssd_fx.passes.planner.place import free_bytes, least_head
from ssd_fx.passes.planner.replay import first_uses, own_s
from ssd_fx.passes.planner.segments import boundaries
from ssd_fx.passes.planner.trials import Choices, Trials, size
from ssd_fx.passes.schedule import Replay

ENOUGH = 2e-3  # a step that is longer than the bound on all plans by a smaller share is good enough
EXHAUSTIVE = 1024  # if there are at most so many combinations of choices, all are tried
FEW = 2  # after so many placements that are not better, look for other items to recompute
MANY = 8  # the same once there are no others to look for
LOOK = 8  # the effort that it takes to look at a change before it is placed
NEAR = 8  # so many of the dearest recomputed items are exchanged for as many of the cheapest others
STRIDES = (1, 2, 3, 4, 8)  # checkpoints at every boundary between layers, at every second one, and so on

Way = tuple[int, bool]  # a way of offloading: the index of an order, and whether items that may stay are deferred


class Search(Trials):
    """Says which choices are tried."""

    def __post_init__(self) -> None:
        super().__post_init__()
        step = self.step
        self.shortest: dict[tuple[frozenset[int], Way], Replay | None] = {}
        self.bounds: dict[frozenset[int], float] = {}
        self.orders = _orders(step)
        self.ways = list(itertools.product(range(len(self.orders)), (False, True)))
        able = (i for i, item in enumerate(step.items) if Choice.RECOMPUTE in item.choices)
        self.dearest = sorted(able, key=self._again_per_byte, reverse=True)  # dearest to recompute, per byte, first
        self.allowed = [_allowed(item) for item in step.items]
        self.preferred = [_preferred(item) for item in step.items]
        self.must = least_bytes(step, self.limit, self.share_bytes)
        self.near_s = (1 + ENOUGH) * lower_bound(step, self.machine, self.limit, self.share_bytes)

    @property
    def is_small(self) -> bool:
        """Whether every choice can be tried."""
        return math.prod(len(a) for a in self.allowed) <= EXHAUSTIVE

    def families(self) -> None:
        """Find the items to recompute: first how many of each order, then exchange some for others. A bound says which
        sets are worth a placement. For the sets that were placed, try the other ways of offloading."""
        for again in (frozenset[int](), *self._layers):
            self._bound(again)
        self._place(self.ways[0], FEW)
        way = self._best_way()
        for cheap in self._again():
            if self._is_spent(1 / 4):
                break
            self._amount(cheap)
            self._place(way, FEW)
        while self.best is not None and not self._is_spent(1 / 4) and self._exchange(way):
            self._place(way, FEW)
        way = self._best_way()
        self._place(way, MANY)
        tried = [(found.seconds if found else math.inf, again) for (again, _), found in self.shortest.items()]
        for (_, again), way in itertools.product(sorted(tried, key=lambda t: t[0]), self.ways):
            if self._is_spent(1 / 8):
                break
            if self._may_gain(again):
                self._shortest(again, way)

    def _best_way(self) -> Way:
        """The way of offloading that is best with the items that the best plan recomputes."""
        if self.best is None:
            return self.ways[0]
        again = _recomputed(self.best.choices)

        def seconds(way: Way) -> float:
            found = self._shortest(again, way) if not self._is_spent(1 / 4) else self.shortest.get((again, way))
            return found.seconds if found else math.inf

        return min(self.ways, key=seconds)

    def _place(self, way: Way, most: int) -> None:
        """Place the sets of recomputed items that may gain, those with the least bounds first, until `most` of them
        were no better than the best."""
        for again in sorted(self.bounds, key=self.bounds.__getitem__):
            if self._is_spent(1 / 4) or most <= 0 or self.bounds[again] == math.inf:
                return
            if (again, way) not in self.shortest and self._may_gain(again):
                before = self.best
                self._shortest(again, way)
                most -= self.best is before and before is not None

    def _exchange(self, way: Way) -> bool:
        """Add, drop or exchange items of the set that the best plan recomputes, while its bound gets less. True if the
        set at the end is worth a placement."""
        assert self.best is not None
        again = _recomputed(self.best.choices)
        unchanged = 0
        changes = [{i} for i in self.dearest]
        inside, outside = [i for i in self.dearest if i in again], [i for i in self.dearest if i not in again]
        changes += [{i, j} for i in inside[:NEAR] for j in outside[: -NEAR - 1 : -1]]
        for change in itertools.cycle(changes):
            unchanged += 1
            other = again.symmetric_difference(change)
            if self._bound(other) < (1 - TOLERANCE) * self._bound(again):
                again, unchanged = other, 0
            if unchanged >= len(changes) or self.left <= self.effort / 4:
                break
        return (again, way) not in self.shortest and self._may_gain(again)

    def _is_spent(self, left: float) -> bool:
        """Whether nothing is to be gained any more, or no more than the share `left` of the effort is left."""
        return self.best is not None and (self.left <= left * self.effort or self.is_over())

    def _again(self) -> Iterator[list[int]]:
        """Orders of the items that may be recomputed. Most have the cheapest per byte first.

        Among items that cost the same, the first layers come first, which are away longest. In the second order the
        last layers come first, whose transfers would have the least time if they were offloaded. The third leaves out
        the items between layers, because to recompute them too would chain the layers. The fourth has whole layers,
        from the first layer on. For this order it is checked with the dear items first which items fit, because beside
        the chains of cheap items there may be no memory for those of dear ones. The other orders leave out the items at
        every second boundary between layers, at every third, and so on.
        """
        items, able = self.step.items, sorted(self.dearest)
        cheap = sorted(able, key=lambda i: (self._again_per_byte(i), items[i].produced))
        first = self._that_fit(cheap)
        yield first
        if not able:
            return
        yield self._that_fit(sorted(able, key=lambda i: (self._again_per_byte(i), -items[i].produced)))
        within = [i for i in cheap if not self._layers or i in self._layers[0]]
        if self._layers:
            yield self._that_fit(within)
        yield sorted(self._that_fit(within[::-1]), key=lambda i: items[i].produced)
        for each in self._layers[1:]:
            yield [i for i in first if i in each]

    @cached_property
    def _layers(self) -> list[frozenset[int]]:
        """The items that checkpoints recompute: all but those between layers, between every second one, and so on."""
        between = boundaries(self.step) if self.dearest else []
        return [frozenset(self.dearest).difference(*between[::stride]) for stride in STRIDES[: len(between)]]

    def _that_fit(self, order: list[int]) -> list[int]:
        """The items of an order that can be recomputed, within the limit, together with those that come before them.

        An item may need so many others so early that there is no memory for them, such as a sum over all layers.
        """
        fit: list[int] = []
        least = self.left - self.effort // 8

        def add(more: list[int]) -> None:
            self.left -= len(self.step.items)
            if self.left < least:
                return  # the rest is not looked at one by one
            choices = self._with({*fit, *more}, self._movable({*fit, *more}, 0), len(self.step.items), False)
            if free_bytes(self.step, choices, self.limit).min(initial=0) >= 0:
                fit.extend(more)
            elif len(more) > 1:
                add(more[: len(more) // 2])
                add(more[len(more) // 2 :])

        add(order)
        return fit

    def _movable(self, recomputed: AbstractSet[int], order: int) -> list[int]:
        """The items of an order that can be offloaded beside the recomputed ones. `order`: its index."""
        return [i for i in self.orders[order] if i not in recomputed]

    def _amount(self, cheap: list[int]) -> None:
        """Bound the plans that recompute the first items of `cheap`: as many as the closed form says, none, all,
        quarters, and then ever nearer neighbours of the best number."""

        def bound(count: int) -> float:
            return self._bound(frozenset(cheap[:count])) if 0 <= count <= len(cheap) else math.inf

        quarters = (len(cheap) * part // 4 for part in (0, 4, 3, 2, 1))
        at = min((self._closed_form(cheap), *quarters), key=bound)
        width = max(len(cheap) // 8, 1)
        while width:
            nearest = min((at, at - width, at + width), key=bound)
            at, width = (nearest, width) if nearest != at else (at, width // 2)

    def _closed_form(self, cheap: Sequence[int]) -> int:
        """How many items to recompute, if the forward hides all writes that fit in its time, and the backward all reads
        that fit in its own."""
        items, forward = self.step.items, self.step.forward
        forward_s, backward_s = sum(self.step.seconds[:forward]), sum(self.step.seconds[forward:])
        lanes = self.machine.lanes("host") if self.step.host_budget else self.machine
        again_s = np.cumsum([0.0, *(self.step.fair_again_s[i] for i in cheap)])
        left = np.maximum(0.0, self.must - np.cumsum([0.0, *(items[i].nbytes for i in cheap)]))
        write_s = np.maximum(0.0, left / lanes.write_bw - forward_s)
        read_s = np.maximum(0.0, left / lanes.read_bw - backward_s - again_s)
        return int(np.argmin(again_s + 2 * lanes.drag_s_per_byte * left + write_s + read_s))

    def _bound(self, recomputed: frozenset[int]) -> float:
        """A lower bound in seconds for all plans that recompute these items."""
        if recomputed not in self.bounds:
            self.left -= size(self.step) // 4  # a bound takes a quarter of the time of a replay
            choices = self._with(recomputed, [], 0, False)
            self.bounds[recomputed] = bound_with(self.step, self.machine, self.limit, choices, self.stays)
        return self.bounds[recomputed]

    def _may_gain(self, recomputed: frozenset[int]) -> bool:
        """Whether a step that recomputes these items can be as fast as the best."""
        return self.best is None or self._bound(recomputed) <= (1 + EQUAL) * self.best.seconds

    def wait_for_writes(self) -> None:
        """Search again with releases that wait for their writes, so that late writes do not change the memory."""
        super().wait_for_writes()
        self.shortest.clear()
        self.families()

    def is_over(self) -> bool:
        """Whether the best plan is fast enough, or no plan can be much better.

        No plan can be much better if both of these hold. The best writes hardly more bytes to the drives than must go.
        And either it takes hardly longer than the lower bound, or it neither stalls nor recomputes and none of its
        transfers costs more than recomputing the item would.
        """
        if self.best is None:
            return False
        if self.best.seconds <= self.enough_s:
            return True
        loses_time = stalls(self.best) or Choice.RECOMPUTE in self.best.choices
        if self.best.seconds > self.near_s and (loses_time or self._dear_transfers()):
            return False
        gone = sum(self.step.nbytes[i] for i, trip in self.best.schedule.items() if trip.tier == "ssd")
        return gone <= 1.01 * max(self.must - self.step.host_budget, 0)

    def _dear_transfers(self) -> bool:
        """Whether a transfer of the best takes more from the compute lane than recomputing its item would."""
        assert self.best is not None
        own, again_s = self.step.once(own_s, self.machine), self.step.own_again_s  # own: at the store, and at the load
        return any(again_s[i] < 2 * own[trip.tier][i] for i, trip in self.best.schedule.items())

    def _shortest(self, recomputed: frozenset[int], way: Way) -> Replay | None:
        """`_shortest_head`, found once."""
        key = recomputed, way
        if key not in self.shortest:
            self.shortest[key] = self._shortest_head(recomputed, *way)
        return self.shortest[key]

    def _shortest_head(self, recomputed: AbstractSet[int], by: int, defer: bool) -> Replay | None:
        """Offload the shortest head of an order that meets the budget. With more offloaded, less memory is needed."""
        order = self._movable(recomputed, by)

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
        """The better of a replay and the one that keeps, instead of recomputing, the items for which there is memory.

        The dearest per byte are kept first. It gains nothing to recompute the logits, for example: the loss reads them
        at the end of the forward, and its gradient reads them at the beginning of the backward.
        """
        items = self.step.items
        free, firsts = self.limit - np.array(found.memory), first_uses(self.step, choices)
        room = self.share_bytes - self.step.kept_bytes(choices)
        tightest, kept = int(free.argmin()), set[int]()
        for i in self.dearest:
            last, first, nbytes = self.step.last_use[i], firsts[i], self.step.nbytes[i]
            if choices[i] is not Choice.RECOMPUTE or nbytes > room or first <= last + 1:
                continue
            if last < tightest < first and nbytes > free[tightest]:
                continue
            gone = free[last + 1 : first]
            if Choice.KEEP in items[i].choices and nbytes <= gone.min():
                gone -= nbytes
                room -= nbytes
                kept.add(i)
        if not kept:
            return found
        other = self.solution(tuple(Choice.KEEP if i in kept else choice for i, choice in enumerate(choices)))
        return other if other is not None and better(other, found) else found

    def _again_per_byte(self, i: int) -> float:
        """Seconds to recompute an item, per byte. An item whose size is only known at run time counts as one byte."""
        return round(self.step.fair_again_s[i] / max(self.step.items[i].nbytes, 1), 15)

    def _with(self, recomputed: AbstractSet[int], order: list[int], count: int, defer: bool) -> Choices:
        """Offload the first `count` of `order`. With `defer`, the next ones are deferred, as in `_defer`."""
        choices = self.preferred.copy()
        for i in recomputed:
            choices[i] = Choice.RECOMPUTE
        for i in order[:count]:
            choices[i] = Choice.OFFLOAD
        if defer:
            self._defer(choices, order[count:])
        return tuple(choices)

    def _defer(self, choices: list[Choice], others: list[int]) -> None:
        """Defer the items of `others` that may not be kept, and of the rest the first ones, until no more than
        `share_bytes` are kept."""
        over = self.step.kept_bytes(choices) - self.share_bytes
        for i in others:
            if over > 0 or choices[i] is Choice.OFFLOAD:
                if choices[i] is Choice.KEEP:
                    over -= self.step.nbytes[i]
                choices[i] = Choice.DEFER

    def improve(self, most: float) -> None:
        """Try every choice of a small step. In a larger one, change single items and pairs while the step gets better.

        `most`: the share of the effort that the changes may take.
        """
        if self.is_small:
            for choices in itertools.product(*self.allowed):
                if self.left > 0:
                    self.solution(choices)
            return
        self.left = min(self.left, int(most * self.effort))
        before = None
        while self.left > 0 and self.best is not before:
            before = self.best
            for together in (1, 2):
                self._change(together)
            if self.best is before:
                self._place(self._best_way(), len(self.bounds))
            if self.best is before:
                self._exchange_in_chains()

    def _change(self, together: int) -> None:
        """Change `together` items of the best plan at once, over all items again and again, until nothing is better."""
        assert self.best is not None
        now, choices = self.best, tuple(self.best.choices)
        changed = self._dearest_first(now)
        unchanged, all_unchanged = 0, math.comb(len(changed), together)
        for items in itertools.cycle(itertools.combinations(changed, together)):
            unchanged += 1
            self.left -= LOOK
            for neighbour in self._changed(choices, items):
                found = self._gaining(neighbour)
                if found is not None and better(found, now):
                    choices, now, unchanged = neighbour, found, 0
            if self.left <= 0 or unchanged >= all_unchanged:
                return

    def _exchange_in_chains(self) -> None:
        """In the best plan, swap the choices of an item and of one that it is made of. At the same time swap those of
        another such pair, or change one other item. For example, a plan may be better if two layers keep their norms
        instead of their inputs, though it is not if only one of them does."""
        assert self.best is not None
        items, choices = self.step.items, self.best.choices
        pairs = [(i, needed) for i, item in enumerate(items) for needed in item.needs]
        exchanges = [
            {i: choices[k], k: choices[i]}
            for i, k in pairs
            if choices[i] is not choices[k] and choices[k] in self.allowed[i] and choices[i] in self.allowed[k]
        ]
        singles = [{i: c} for i, allowed in enumerate(self.allowed) for c in allowed if c is not choices[i]]
        for one, other in itertools.chain(itertools.combinations(exchanges, 2), itertools.product(exchanges, singles)):
            if self.left <= 0:
                return
            self.left -= LOOK
            if one.keys().isdisjoint(other):
                changed = one | other
                self._gaining(tuple(changed.get(i, c) for i, c in enumerate(choices)))

    def _changed(self, choices: Choices, items: tuple[int, ...]) -> Iterator[Choices]:
        """The choices with another one for each of these items. Of two items, at least one takes the choice of the
        other: for example, one leaves memory instead of the other."""
        own = [choices[i] for i in items]
        for others in itertools.product(*(self.allowed[i] for i in items)):
            exchanged = len(items) == 1 or others[0] is own[1] or others[1] is own[0]
            if not exchanged or any(a is b for a, b in zip(own, others, strict=True)):
                continue
            if len(items) == 2 and Choice.DEFER in others:
                continue
            changed = list(choices)
            for i, other in zip(items, others, strict=True):
                changed[i] = other
            yield tuple(changed)

    def _gaining(self, choices: Choices) -> Replay | None:
        """The choices placed and replayed; None if the step cannot be as fast as the best."""
        self.left -= 1
        return self.solution(choices) if self._may_gain(_recomputed(choices)) else None

    def _dearest_first(self, now: Replay) -> list[int]:
        """The items by what they cost in the step: waits, and seconds to recompute them."""
        items, waits = self.step.items, now.waits

        def cost_s(i: int) -> float:
            return waits.get(i, 0.0) + (items[i].recompute_s if now.choices[i] is Choice.RECOMPUTE else 0.0)

        return sorted(range(len(items)), key=lambda i: (-cost_s(i), i))


def _orders(step: Step) -> list[list[int]]:
    """The orders in which items may be offloaded."""
    items = step.items
    idle = [items[i].produced - items[i].first_use for i in range(len(items))]  # the lower, the longer the item is idle
    keys: tuple[Callable[[int], tuple[float, ...]], ...] = (
        lambda i: (idle[i], -items[i].nbytes, i),  # longest idle first
        lambda i: (idle[i] * items[i].nbytes, i),  # most idle bytes first
        lambda i: (items[i].last_use, i),  # soonest free to go
        lambda i: (-items[i].nbytes, idle[i], i),  # fewest transfers
    )
    return [sorted(step.movable, key=key) for key in keys]


def _recomputed(choices: Sequence[Choice]) -> frozenset[int]:
    return frozenset(i for i, choice in enumerate(choices) if choice is Choice.RECOMPUTE)


def _allowed(item: Item) -> list[Choice]:
    choices = sorted(item.choices, key=lambda c: c.value)
    return [*choices, Choice.DEFER] if Choice.OFFLOAD in choices else choices


def _preferred(item: Item) -> Choice:
    return next(c for c in (Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE) if c in item.choices)
