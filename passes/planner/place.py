"""Chooses where stores, releases and loads stand, once it is decided which items are offloaded.

    forward    [store] at once ..... [release] as late as the limit allows, or at the predicted end of the write
    backward   [load] as late as the read lane allows, within the limit ..... [wait] first use

A release earlier than the limit needs would only wait longer for its write. A release that the limit does not need
stands at the predicted end of the write and waits for nothing. Loads are placed by earliest deadline. Each stands at
the latest start that the read lane allows, with a margin, or later if there is no memory for it before.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ssd_fx.options import TIERS, Tier
from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.replay import again, first_uses
from ssd_fx.passes.schedule import RELEASE, Replay, Schedule, Trip

# Loads start this many times their predicted duration before they are due: the predictions are coarse, and an early
# load costs some memory within the limit, while a late one costs a stall.
LOAD_MARGIN = 2.0
# So many items may be loaded before their use, however large they are. Items of a wide layer are larger than `prefetch`
# and are used one soon after the other. If they were loaded one at a time, the step would wait for most of them.
TOGETHER = 3

FloatArray = npt.NDArray[np.float64]


@dataclass
class Placer:
    """Places the transfers of the items that `choices` offload, with memory never above `limit` bytes.

    At most `prefetch` bytes are loaded before their use, or `TOGETHER` items. `hosted`: the items that go to host
    memory. Items that are deferred are forwarded if the backward begins before they are written, so memory is kept for
    them. `stays`: bytes of the items that may be in memory when the backward begins.
    """

    step: Step
    choices: Sequence[Choice]
    machine: Machine
    limit: float
    prefetch: float = float("inf")
    hosted: AbstractSet[int] = frozenset()
    stays: float = float("inf")

    def __post_init__(self) -> None:
        self.firsts = first_uses(self.step, self.choices)
        self.deferred = {i for i, c in enumerate(self.choices) if c is Choice.DEFER}
        self.offloaded = [i for i, c in enumerate(self.choices) if c is Choice.OFFLOAD or c is Choice.DEFER]
        self.room = free_bytes(self.step, self.choices, self.limit, self.firsts)

    def place(self, played: Replay | None = None, margin: float = LOAD_MARGIN) -> Schedule | None:
        """The schedule; None if the limit cannot be met even if every release waits for its write. Deferred items are
        not released for the limit.

        `played`: the replay of an earlier placement, which says when the operators start; without it, no operator is
        assumed to stall. `margin`: a load starts that many times its predicted duration before it is due.
        """
        self.starts = self._starts() if played is None else played.starts
        self.ends = self.starts[1:] if played is None else played.ends
        self.margin, self.free = margin, self.room.copy()
        self.written: dict[int, float] = {}
        self.store_after: dict[int, int] = {}
        self.release_after: dict[int, int] = {}
        self.blocking: set[int] = set()  # the items whose releases wait for their writes
        self.load_before: dict[int, int] = {}
        self.strict: set[int] = set()  # the items whose loads would stand earlier if there were memory
        if len(self.free) and self.free.min() < 0:
            return None
        order = self._write_order()
        if not self._force_releases(order):
            return None
        stalls = played.stalls.items() if played else ()
        last = self.step.forward - 1
        waited = sum(seconds for event, seconds in stalls if event.kind is RELEASE and event.at == last)
        self._release_when_written(order, self.ends[last] + waited)
        self._load()
        return Schedule(map(self._trip, self.offloaded), self.step.items)

    def _trip(self, i: int) -> Trip:
        places = self.store_after[i], self.release_after[i], self.load_before[i], self.firsts[i]
        return Trip.of(i, *places, block=i in self.blocking, strict=i in self.strict, tier=self._tier(i))

    def _tier(self, i: int) -> Tier:
        return "host" if i in self.hosted else "ssd"

    def _starts(self) -> Sequence[float]:
        """When every operator starts if nothing stalls."""
        seconds, machine = list(self.step.seconds), self.machine
        for first, again_s in again(self.step, self.choices, self.firsts):
            seconds[first] += again_s
        for i in self.offloaded:
            item = self.step.items[i]
            own = machine.own_s(item.moved_nbytes, self._tier(i))
            seconds[item.produced] += own
            seconds[self.firsts[i]] += own
        return [0.0, *itertools.accumulate(seconds)]

    def _write_order(self) -> list[int]:
        """The order in which the writes end. Also notes in `self.written` when each of them has ended."""
        if not self.hosted:
            return self._lane_order("ssd", self.offloaded)
        orders = [self._lane_order(tier, [i for i in self.offloaded if self._tier(i) == tier]) for tier in TIERS]
        return sorted(itertools.chain(*orders), key=self.written.__getitem__)

    def _lane_order(self, tier: Tier, offloaded: list[int]) -> list[int]:
        """The order of the writes of one lane. Of the items produced so far, the lane writes the one whose last read in
        the forward comes soonest.

        A tensor can wait if the forward will still read it for a long time. Deferred items come last.
        """
        items = self.step.items
        lanes = self.machine.lanes(tier)
        coming = deque(sorted(offloaded, key=lambda i: (items[i].produced, items[i].last_use, i)))
        waiting: list[tuple[bool, int, int, int]] = []  # a heap; the last number is the item
        order: list[int] = []
        free = 0.0  # when the lane has written all of `order`
        position = 0
        while coming or waiting:
            if not waiting:
                free = max(free, self.ends[items[coming[0]].produced])
            while coming and self.ends[items[coming[0]].produced] <= free:
                i = coming.popleft()
                heapq.heappush(waiting, (i in self.deferred, items[i].last_use, items[i].produced, i))
            _, _, _, best = heapq.heappop(waiting)
            order.append(best)
            free += items[best].moved_nbytes / lanes.write_bw
            self.written[best] = free + lanes.latency_s
            position = max(position, items[best].produced)
            self.store_after[best] = position
        return order

    def _force_releases(self, order: list[int]) -> bool:
        """Release the items that the limit does not let stay, as late as the limit allows, in the order in which the
        writes end. False if the limit cannot be met."""
        items, forward = self.step.items, self.step.forward
        releasable: list[tuple[int, int]] = []  # a heap: the item whose write ends first comes first
        idle: dict[int, int] = {}  # bytes that the forward reads no more, by the operator that read them last
        ready: dict[int, list[tuple[int, int]]] = {}
        for rank, i in enumerate(order):
            if i in self.deferred:
                continue
            idle[items[i].last_use] = idle.get(items[i].last_use, 0) + items[i].nbytes
            ready.setdefault(max(items[i].last_use, self.store_after[i]), []).append((rank, i))
        held, free = 0, self.free[:forward].tolist()
        for p in range(forward):
            while held > free[p]:
                if not releasable:
                    return False
                _, i = heapq.heappop(releasable)
                self.release_after[i] = p - 1
                self.blocking.add(i)
                held -= items[i].nbytes
            for entry in ready.get(p, ()):
                heapq.heappush(releasable, entry)
            held += idle.get(p, 0)
        return True

    def _release_when_written(self, order: list[int], begin: float) -> None:
        """Release all other items where their writes are predicted to have ended, or else at the end of the forward.

        `begin`: when the backward begins, by the times in `self.starts`.

        If an item is still being written at the end of the forward, its release blocks if the item may not stay, or if
        the backward has no room for it. Then the backward begins later, and by then more of the items that follow in
        the write order are written.
        """
        items, forward = self.step.items, self.step.forward
        last, turn = forward - 1, self.ends[forward - 1]
        for i in order:
            if i not in self.release_after:
                done = bisect_left(self.starts, self.written[i]) - 1
                self.release_after[i] = min(max(items[i].last_use, self.store_after[i], done), last)
        stay = self._may_stay(order)
        for i in order:
            if self.release_after[i] < last or i in self.deferred:
                continue
            # the first operator of the backward that begins after the write has ended, if the backward begins at `turn`
            done = bisect_left(self.starts, self.written[i] - turn + begin, forward)
            span = self.free[forward : min(done, self.firsts[i])]
            if i in self.blocking or i not in stay or np.minimum.reduce(span, initial=np.inf) < items[i].nbytes:
                self.blocking.add(i)
                turn = max(turn, self.written[i])
            else:
                span -= items[i].nbytes

    def _may_stay(self, order: list[int]) -> AbstractSet[int]:
        """The items that may still be in memory when the backward begins: the last ones written, as far as they fit."""
        if self.stays == float("inf"):
            return set(order)
        nbytes, found = self.step.nbytes, set[int]()
        left = self.stays - self.step.kept_bytes(self.choices) - sum(nbytes[i] for i in self.deferred)
        for i in reversed(order):
            left -= 0 if i in self.deferred else nbytes[i]
            if left < 0:
                break
            found.add(i)
        return found

    def _load(self) -> None:
        """Place each load at its latest start, or later if memory or `prefetch` does not allow that."""
        items, free = self.step.items, self.free
        by_deadline = sorted(self.offloaded, key=lambda i: (self.firsts[i], i))
        wanted = self._latest_starts(by_deadline)
        window: list[int] = []
        ahead = earliest = 0
        for i in by_deadline:
            item = items[i]
            if i in self.deferred:
                is_late = self.written[i] > self.starts[self.step.forward]
                self.load_before[i] = self.step.forward if is_late else wanted[i]
                continue
            ahead += item.nbytes
            window.append(i)
            while ahead > self.prefetch and len(window) > TOGETHER:
                first = window.pop(0)
                ahead -= items[first].nbytes
                earliest = max(earliest, self.firsts[first])
            begin = at = max(wanted[i], min(earliest, self.firsts[i]))
            span = free[begin : self.firsts[i]]
            if np.minimum.reduce(span, initial=np.inf) < item.nbytes:
                at += int(np.flatnonzero(span < item.nbytes)[-1]) + 1
            free[at : self.firsts[i]] -= item.nbytes
            self.load_before[i] = at
            if at > begin:
                self.strict.add(i)

    def _latest_starts(self, by_deadline: list[int]) -> dict[int, int]:
        lane, wanted = {"ssd": float("inf"), "host": float("inf")}, {}
        for i in reversed(by_deadline):
            item, tier, lanes = self.step.items[i], self._tier(i), self.machine.lanes(self._tier(i))
            seconds = lanes.latency_s + self.margin * item.moved_nbytes / lanes.read_bw
            lane[tier] = min(lane[tier], self.starts[self.firsts[i]]) - seconds
            wanted[i] = min(max(bisect_right(self.starts, lane[tier]) - 1, self.step.forward), self.firsts[i])
        return wanted


def free_bytes(step: Step, choices: Sequence[Choice], limit: float, firsts: Sequence[int] | None = None) -> FloatArray:
    """Bytes under the limit during every operator, if each item that is not kept is gone for as long as it can be.
    Deferred items count as kept.

    `firsts`: as `first_uses` has them.
    """
    firsts = first_uses(step, choices) if firsts is None else firsts
    gone = [i for i, choice in enumerate(choices) if choice is not Choice.KEEP and choice is not Choice.DEFER]
    return limit - np.cumsum(_changed(step, gone, firsts)[:-1])


def _changed(step: Step, gone: Sequence[int], firsts: Sequence[int]) -> FloatArray:
    """How the bytes alive change from each operator to the next, with these items gone between their uses."""
    chosen, change = np.array(gone, dtype=np.intp), step.arrays.change.copy()
    nbytes = step.arrays.nbytes[chosen]
    np.subtract.at(change, step.arrays.last_use[chosen] + 1, nbytes)
    np.add.at(change, np.array(firsts, dtype=np.intp)[chosen], nbytes)
    return change


def least_head(step: Step, choices: Sequence[Choice], order: Sequence[int], limit: float) -> int:
    """How many items of `order` must be offloaded beside `choices` to meet the limit, if transfers take no time.

    If the limit cannot be met, that is all of them.
    """
    firsts = first_uses(step, choices)
    free = free_bytes(step, choices, limit, firsts)
    chosen = np.array(order, dtype=np.intp)
    kept = np.array([choices[i] is Choice.KEEP for i in order], dtype=np.float64)
    nbytes, gone = kept * step.arrays.nbytes[chosen], step.arrays.last_use[chosen] + 1
    back = np.array(firsts, dtype=np.intp)[chosen]

    def is_enough(count: int) -> bool:
        change = np.zeros(len(free) + 1)
        np.subtract.at(change, gone[:count], nbytes[:count])
        np.add.at(change, back[:count], nbytes[:count])
        return bool((free - np.cumsum(change[:-1])).min(initial=0) >= 0)

    return bisect_left(range(len(order)), True, key=is_enough)
