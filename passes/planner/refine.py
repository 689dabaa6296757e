"""The last part of the search: one item at a time gets another choice or other places, while the step gets better.

    release    as late as the limit allows  ->  earlier, later, or handed over
    load       as late as the lane allows   ->  1, 2, 4, 8 ... operators before its use
    store      at once                      ->  later, behind writes that the limit waits for

The placement decides all items by rules; here the simulator decides single ones by what they really cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ssd_fx.passes.cost.machine import Machine, Tier
from ssd_fx.passes.planner.simulate import Choice, Item, Outcome, Step, Transfer, first_uses, simulate

TOLERANCE = 1e-4  # step times that differ by a smaller share are equal; then bytes written count


@dataclass(frozen=True)
class Solution:
    """Choices and transfers, with what the simulator says of them."""

    choices: tuple[Choice, ...]
    transfers: Mapping[int, Transfer]
    outcome: Outcome

    @property
    def pays(self) -> bool:
        """Whether it stalls, or computes again what another one may load in time."""
        stalled = self.outcome.stall_s > TOLERANCE * self.outcome.seconds
        return stalled or Choice.RECOMPUTE in self.choices


Move = tuple[Choice, Transfer | None]
Draft = tuple[tuple[Choice, ...], Mapping[int, Transfer]]


def refine(
    step: Step,
    machine: Machine,
    start: Solution,
    *,
    limit: float,
    share_bytes: float,
    effort: int,
    prefetch: float = math.inf,
) -> Solution:
    """The best solution reached by changing one item at a time; `effort`: operators and items simulated at most."""
    best, cost, window = start, size(step), Window.of(step, start, prefetch)
    items, unchanged, i = step.items, 0, 0
    while unchanged < len(items) and effort > 0:
        before = best
        for plan in itertools.chain(_places(step, best, i), _earlier(step, best, i, limit)):
            effort -= cost
            changed = _played(step, machine, plan, limit, share_bytes)
            if changed is not None and window.holds(step, changed) and better(changed.outcome, best.outcome):
                best = changed
        unchanged = unchanged + 1 if best is before else 0
        i = (i + 1) % len(items)
    return with_strict(step, start, best, limit)


@dataclass(frozen=True)
class Window:
    """`prefetch`: bytes that may be read before their use, or one item; more where the search began with more."""

    prefetch: float

    @staticmethod
    def of(step: Step, start: Solution, prefetch: float) -> Window:
        return Window(max(prefetch, read_ahead(step, start)))

    def holds(self, step: Step, found: Solution) -> bool:
        return self.prefetch == math.inf or read_ahead(step, found) <= self.prefetch


def read_ahead(step: Step, found: Solution) -> int:
    """The most bytes that are read before their use at a time, where these are several items."""
    firsts, nbytes = first_uses(step, found.choices), step.columns.nbytes
    count, change = [0] * (len(step.seconds) + 1), [0] * (len(step.seconds) + 1)
    for i, transfer in found.transfers.items():
        if i not in found.outcome.handed_back:
            for at, sign in ((transfer.load_before, 1), (firsts[i], -1)):
                count[at] += sign
                change[at] += sign * nbytes[i]
    ahead = zip(itertools.accumulate(count), itertools.accumulate(change), strict=True)
    return max(total for items, total in [(2, 0), *ahead] if items > 1)


def with_strict(step: Step, start: Solution, found: Solution, limit: float) -> Solution:
    """Loads that are not those of `start` are strict where memory has no room for them one operator earlier."""

    def strict(i: int, transfer: Transfer) -> bool:
        at = transfer.load_before - 1
        return at >= step.forward and found.outcome.memory[at] + step.items[i].nbytes > limit

    same = {i for i, t in found.transfers.items() if i in start.transfers and _load(start, i) == _load(found, i)}
    kept = {i: replace(found.transfers[i], strict=start.transfers[i].strict) for i in same}
    moved = {i: replace(t, strict=strict(i, t)) for i, t in found.transfers.items() if i not in same}
    return replace(found, transfers={i: kept.get(i) or moved[i] for i in found.transfers})


def _load(found: Solution, i: int) -> tuple[int, bool]:
    return found.transfers[i].load_before, i in found.outcome.handed_back


def size(step: Step) -> int:
    """What simulating the step costs, counted in operators."""
    return len(step.seconds) + 4 * len(step.items)


def better(a: Outcome, b: Outcome) -> bool:
    """Whether step `a` is faster than `b`, or as fast and writes less."""
    if abs(a.seconds - b.seconds) > TOLERANCE * b.seconds:
        return a.seconds < b.seconds
    return (a.written, a.seconds) < (b.written, b.seconds)


def _played(step: Step, machine: Machine, plan: Draft, limit: float, share_bytes: float) -> Solution | None:
    """The plan simulated, None where it does not fit."""
    choices, transfers = plan
    if kept_bytes(step, choices) > share_bytes:
        return None
    firsts = first_uses(step, choices)
    if any(t.load_before > firsts[i] for i, t in transfers.items()):
        return None  # something else that is recomputed needs it earlier
    outcome = simulate(step, choices, transfers, machine)
    return Solution(choices, transfers, outcome) if fits(step, outcome, limit) else None


def fits(step: Step, outcome: Outcome, limit: float) -> bool:
    """Whether a plan is one: within limits, and whatever is to be written is written as soon as its lane can."""
    return outcome.peak <= limit and outcome.host_peak <= step.host_budget and not outcome.held_back


def _places(step: Step, now: Solution, i: int) -> Iterator[Draft]:
    """Item i with each of its moves."""
    for choice, transfer in moves(step, step.items[i], (now.choices[i], now.transfers.get(i))):
        yield _with(now.choices, now.transfers, i, choice, transfer)


def _with(
    choices: tuple[Choice, ...], transfers: Mapping[int, Transfer], i: int, choice: Choice, transfer: Transfer | None
) -> Draft:
    others = {k: t for k, t in transfers.items() if k != i}
    return (*choices[:i], choice, *choices[i + 1 :]), others | ({} if transfer is None else {i: transfer})


def _earlier(step: Step, now: Solution, i: int, limit: float) -> Iterator[Draft]:
    """Item i loaded earlier, and what is in the way of it offloaded and loaded at its use."""
    if i not in now.transfers:
        return
    at, item = now.transfers[i], step.items[i]
    for distance in _distances(at.load_before - step.forward):
        load = at.load_before - distance
        if distance and load >= step.forward:
            moved = Transfer(at.store_after, min(at.release_after, load - 1), at.block, load, tier=at.tier)
            over = {p: now.outcome.memory[p] + item.nbytes - limit for p in range(load, at.load_before)}
            for late, block in ((False, False), (True, False), (False, True)):
                draft = _with(now.choices, now.transfers, i, Choice.OFFLOAD, moved)
                if (cleared := _cleared(step, draft, i, dict(over), late, block)) is not None:
                    yield cleared


def _cleared(step: Step, draft: Draft, but: int, over: dict[int, float], late: bool, block: bool) -> Draft | None:
    """Others offloaded until no operator is `over` its limit: the smallest that is enough, else the largest.

    `late`: they are stored behind their last use instead of at once; `block`: the forward ends when they are written.
    With neither, what is offloaded already is only loaded later: the limit may need it gone where it goes.
    """
    while (worst := max(over, key=lambda p: over[p])) and over[worst] > 0:
        choices, transfers = draft
        free = [
            k
            for k, item in enumerate(step.items)
            if k != but and Choice.OFFLOAD in item.choices and item.last_use < worst < item.first_use
            if choices[k] is Choice.KEEP or (k in transfers and transfers[k].load_before <= worst)
        ]
        if not free:
            return None
        lack = over[worst]
        k = min(free, key=lambda k: (step.items[k].nbytes < lack, abs(step.items[k].nbytes - lack)))
        item = step.items[k]
        store, release = item.last_use if late else item.produced, step.forward - 1 if block else item.last_use
        if k in transfers and not late and not block:
            moved = replace(transfers[k], load_before=item.first_use)
        else:
            moved = Transfer(store, release, block, item.first_use, tier=_tier(item, transfers.get(k)))
        draft = _with(choices, transfers, k, Choice.OFFLOAD, moved)
        begin = transfers[k].load_before if k in transfers else 0
        for p in over:
            if begin <= p < item.first_use:
                over[p] -= item.nbytes
    return draft


def kept_bytes(step: Step, choices: tuple[Choice, ...]) -> int:
    """Bytes that are kept of what may leave."""
    return sum([nbytes for nbytes, c in zip(step.columns.free_to_leave, choices, strict=True) if c is Choice.KEEP])


def moves(step: Step, item: Item, now: Move) -> Iterator[Move]:
    """Other choices for one item, and other places for what it moves."""
    yield from ((choice, None) for choice in Choice if choice in item.choices - {Choice.OFFLOAD, now[0]})
    if Choice.OFFLOAD not in item.choices:
        return
    for store in dict.fromkeys((item.produced, item.last_use, step.forward - 1)):  # handed back, if the lane is busy
        transfer = Transfer(store, step.forward - 1, False, step.forward, tier=_tier(item, now[1]))
        yield Choice.OFFLOAD, transfer
    loads = list(dict.fromkeys(max(step.forward, item.first_use - d) for d in _distances(item.first_use)))
    releases = list(dict.fromkeys(min(step.forward - 1, item.last_use + d) for d in _distances(step.forward)))
    stores = [p for p in dict.fromkeys((item.produced, item.last_use, step.forward - 1)) if p >= item.produced]
    if now[1] is None:
        places = [
            (item.produced, r, b, load) for r in (releases[0], releases[-1]) for b in (True, False) for load in loads
        ]
    else:
        at = now[1]
        places = [
            (at.store_after, at.release_after, at.block, load)
            for load in (at.load_before + 1, at.load_before - 1, *loads)
        ]
        places += [
            (at.store_after, r, b, at.load_before)
            for r in (at.release_after + 1, at.release_after - 1, *releases)
            for b in (True, False)
        ]
        places += [
            (s, at.release_after, b, at.load_before)
            for s in (at.store_after + 1, at.store_after - 1, *stores)
            for b in (True, False)
        ]
    for store, release, block, load in places:
        store = min(max(store, item.produced), step.forward - 1)
        release = min(max(release, store, item.last_use), step.forward - 1)
        load = min(max(load, step.forward), item.first_use)
        transfer = Transfer(store, release, block, load, tier=_tier(item, now[1]))
        if transfer != now[1]:
            yield Choice.OFFLOAD, transfer


def _tier(item: Item, now: Transfer | None) -> Tier:
    return now.tier if now else item.tier or "ssd"


def _distances(most: int) -> Iterator[int]:
    yield 0
    distance = 1
    while distance < 2 * most:
        yield distance
        distance *= 2
