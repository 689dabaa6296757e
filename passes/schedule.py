"""A training step on one axis: what is known of it, what is planned in it, and how it runs.

    Step       the operators or nodes of the forward and then of the backward, and the alias groups as items
    Schedule   the events of the groups that are offloaded, in the order in which they run
    Replay     the step with a schedule in it: when everything happens, what is in memory, who waits

    forward    produced [store] ........ [release] last_use          store, release: behind their place on the axis
    backward   [load] .... [wait] first_use ........ last_bwd_use    load, wait: before it

A place on the axis is the index of a node in a `Plan`, and that of an operator in the planner, which merges nodes
(`planner/step.py`). The indices of the backward follow those of the forward.
"""

from __future__ import annotations

import enum
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

if TYPE_CHECKING:
    from ssd_fx.passes.cost.machine import Machine, Tier

T = TypeVar("T")
Span = tuple[float, float]  # begin and end, in seconds


class Choice(enum.Enum):
    """What becomes of an alias group between forward and backward.

    A group that is deferred is offloaded, but it is written when there is nothing else to write, and loaded first. If
    it is still in memory then, it is forwarded: nothing is read.
    """

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    DEFER = "defer"

    __hash__ = object.__hash__  # Enum's own is a Python function, and the search looks up tuples of thousands of these


CHOICES = frozenset({Choice.KEEP, Choice.RECOMPUTE, Choice.OFFLOAD})  # what may be allowed; only the search defers


@dataclass(frozen=True, slots=True)
class Item:
    """An alias group of `nbytes`, and its places on the axis: where it is produced and read last in the forward, read
    first and last in the backward.

    `choices`: what is allowed. `recompute_s`: seconds to compute it again, for which the items `needs` must be there.
    `tier`: where it goes if it is offloaded, host memory only as far as it fits; None: wherever it is better.
    """

    nbytes: int
    produced: int
    last_use: int
    first_use: int
    last_bwd_use: int
    recompute_s: float = math.inf
    choices: frozenset[Choice] = frozenset({Choice.KEEP, Choice.OFFLOAD})
    needs: tuple[int, ...] = ()
    stored_nbytes: int | None = None
    tier: Tier | None = None

    @property
    def moved_nbytes(self) -> int:
        """Bytes that are written and read back; fewer than `nbytes` where a part of the storage is enough."""
        return self.nbytes if self.stored_nbytes is None else self.stored_nbytes


@dataclass(frozen=True, slots=True)
class Shared:
    """What the prices of several items have in common: those that are recomputed together compute it once."""

    seconds: float
    items: tuple[int, ...]


def _of_items(field: Callable[[Item], int]) -> cached_property[list[int]]:
    """What is read of every item each time that the step is replayed."""
    return cached_property(lambda step: [field(item) for item in step.items])


@dataclass(frozen=True)
class Step:
    """One training step, as the planner sees it.

    `seconds`: of every operator, forward then backward. `base`: the bytes alive during each that no choice touches.
    `forward`: how many of them are the forward's. `host_budget`: bytes that may be in host memory. `shared`: seconds
    that are in the price of more than one item. Of the step of a graph, `slots` has the slot of every item, and `nodes`
    the first and the last node of every operator.
    """

    seconds: tuple[float, ...]
    base: tuple[int, ...]
    forward: int
    items: tuple[Item, ...]
    host_budget: int = 0
    shared: tuple[Shared, ...] = ()
    slots: tuple[int, ...] = ()
    nodes: tuple[tuple[int, int], ...] = field(repr=False, default=())

    def again_s(self, recomputed: Collection[int]) -> float:
        """Seconds to recompute these items together."""
        together = frozenset(recomputed)
        alone = math.fsum(self.items[i].recompute_s for i in together)
        return alone - math.fsum(s.seconds * max(len(together.intersection(s.items)) - 1, 0) for s in self.shared)

    @cached_property
    def own_again_s(self) -> list[float]:
        """Seconds to recompute every item, without what it shares with others: no set of items costs less."""
        own = [item.recompute_s for item in self.items]
        for shared in self.shared:
            for i in shared.items:
                own[i] -= shared.seconds
        return own

    @cached_property
    def fair_again_s(self) -> list[float]:
        """Seconds to recompute every item, with its part of what it shares: by bytes, as if all were recomputed."""
        fair = list(self.own_again_s)
        for shared in self.shared:
            nbytes = sum(self.items[i].nbytes for i in shared.items)
            for i in shared.items:
                fair[i] += shared.seconds * self.items[i].nbytes / max(nbytes, 1)
        return fair

    @cached_property
    def kernels(self) -> int:
        """How many operators take time."""
        return sum(seconds > 0 for seconds in self.seconds)

    nbytes = _of_items(lambda item: item.nbytes)
    moved = _of_items(lambda item: item.moved_nbytes)
    produced = _of_items(lambda item: item.produced)
    last_use = _of_items(lambda item: item.last_use)
    first_use = _of_items(lambda item: item.first_use)
    free_bytes = _of_items(lambda item: item.nbytes if len(item.choices) > 1 else 0)  # of what has a choice

    @cached_property
    def change(self) -> list[int]:
        """How the bytes alive with everything kept change from each operator to the next."""
        change = [after - before for before, after in itertools.pairwise((0, *self.base, 0))]
        for item in self.items:
            change[item.produced] += item.nbytes
            change[item.last_bwd_use + 1] -= item.nbytes
        return change

    @cached_property
    def everything(self) -> int:
        """The peak in bytes with everything kept."""
        return max(itertools.accumulate(self.change[:-1]), default=0)

    @cached_property
    def floor(self) -> int:
        """The peak in bytes with all that can be offloaded or recomputed gone, and infinitely fast I/O."""
        change = self.change.copy()
        for item in self.items:
            if item.choices != {Choice.KEEP}:
                change[item.last_use + 1] -= item.nbytes
                change[item.first_use] += item.nbytes
        return max(itertools.accumulate(change[:-1]), default=0)

    def kept_bytes(self, choices: Sequence[Choice]) -> int:
        """Bytes that are kept of what can be offloaded or recomputed."""
        return sum([nbytes for nbytes, c in zip(self.free_bytes, choices, strict=True) if c is Choice.KEEP])

    def operator(self, node: int) -> int:
        """The operator that a node of the graph belongs to."""
        return bisect_right(self.nodes, (node, math.inf)) - 1

    @cached_property
    def _found(self) -> dict[object, object]:
        return {}

    def once(self, analysis: Callable[[Step, Machine], T], machine: Machine) -> T:
        """The result of `analysis`, computed once for each machine."""
        key = (analysis, machine)
        if key not in self._found:
            self._found[key] = analysis(self, machine)
        return cast(T, self._found[key])


class Kind(enum.IntEnum):
    """What happens to a group, in this order."""

    STORE = 0
    RELEASE = 1
    LOAD = 2
    WAIT = 3


STORE, RELEASE, LOAD, WAIT = Kind


class Event(NamedTuple):
    """One node of ours: it stands behind the place `at` if it stores or releases, else before it.

    `slot`: of the group; in the planner the index of the item. `tier`: where the bytes are between store and load.
    `flag`, of a store: it is *later*, so it is written only if another forward begins before the load. Of a release: it
    *blocks*, that is, waits for the write, because the budget needs the memory here. Of a load: it is *strict*, because
    the budget has no memory for an earlier one.
    """

    slot: int
    kind: Kind
    at: int
    flag: bool = False
    tier: Tier = "ssd"


class Trip(NamedTuple):
    """The events of one group that is offloaded."""

    store: Event
    release: Event
    load: Event
    wait: Event

    @staticmethod
    def of(
        slot: int,
        store: int,
        release: int,
        load: int,
        wait: int,
        *,
        later: bool = False,
        block: bool = False,
        strict: bool = False,
        tier: Tier = "ssd",
    ) -> Trip:
        """The events of a group at these places, with their flags."""
        return Trip(
            Event(slot, STORE, store, later, tier),
            Event(slot, RELEASE, release, block, tier),
            Event(slot, LOAD, load, strict, tier),
            Event(slot, WAIT, wait, False, tier),
        )

    def moved(self, *, block: bool | None = None, strict: bool | None = None, **places: int) -> Trip:
        """The trip with other places, by the names of its events; with a release that blocks or does not, with a load
        that is strict or is not."""
        found = self._replace(**{name: getattr(self, name)._replace(at=at) for name, at in places.items()})
        if block is not None:
            found = found._replace(release=found.release._replace(flag=block))
        return found if strict is None else found._replace(load=found.load._replace(flag=strict))

    @property
    def slot(self) -> int:
        return self.store.slot

    @property
    def is_later(self) -> bool:
        return self.store.flag

    @property
    def blocks(self) -> bool:
        return self.release.flag

    @property
    def is_strict(self) -> bool:
        return self.load.flag

    @property
    def tier(self) -> Tier:
        return self.store.tier


Items = Mapping[int, Item] | Sequence[Item]  # the groups of a schedule, by slot


class ScheduleError(RuntimeError):
    """The events of a group are out of order, or there are more than four: a bug in the planner."""


class Schedule(Mapping[int, Trip]):
    """The events of one step in the order in which they run, and the trip of every slot.

    Of stores at one place those come first whose release blocks, then those that the forward reads no more. Of loads at
    one place the one that is waited for first comes first. The others are in the order of slots. The
    position of an event in `forward` or `backward` is its planned sequence number.
    """

    def __init__(self, trips: Iterable[Trip] = (), items: Items = ()) -> None:
        """Put the trips in order.

        Raises:
            ScheduleError: the events of a slot are out of order, or it has two trips.
        """
        ordered = sorted(trips)  # by slot
        self._trips = {trip.slot: trip for trip in ordered}
        if len(self._trips) < len(ordered):
            raise ScheduleError("a slot has several trips")
        for store, release, load, wait in ordered:
            if not store.at <= release.at < load.at <= wait.at:
                raise ScheduleError(
                    f"slot {store.slot} is stored behind {store.at}, released behind {release.at}, loaded before "
                    f"{load.at} and waited for before {wait.at}, which is no order"
                )
        stored = sorted(ordered, key=lambda trip: (not trip.blocks, items[trip.slot].last_use))
        loaded = sorted(ordered, key=lambda trip: trip.wait.at)
        forward = [*(trip.store for trip in stored), *(trip.release for trip in ordered)]
        backward = [*(trip.load for trip in loaded), *(trip.wait for trip in ordered)]
        self.forward, self.backward = (tuple(sorted(each, key=attrgetter("at"))) for each in (forward, backward))

    @property
    def events(self) -> tuple[Event, ...]:
        return self.forward + self.backward

    def __getitem__(self, slot: int) -> Trip:
        return self._trips[slot]

    def __iter__(self) -> Iterator[int]:
        """The slots, in order."""
        return iter(self._trips)

    def __len__(self) -> int:
        return len(self._trips)

    def items(self) -> ItemsView[int, Trip]:
        return self._trips.items()

    def __hash__(self) -> int:
        return hash(self.events)

    def edited(self, edit: Callable[[int, Trip], Trip], items: Items) -> Schedule:
        """The schedule of what `edit` makes of every trip."""
        return Schedule([edit(slot, trip) for slot, trip in self.items()], items)


EMPTY = Schedule()


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How a step runs with these choices and this schedule, as far as that is predicted (`planner/replay.py`).

    Times are seconds from the start of the step. Bytes are above the level before it: parameters do not count.

    `seconds`: of the step. It is the time of the host where that needs longer than the device. `starts`, `ends`:
    of every operator; `starts` has the end of the step as well. `memory`, `host`: bytes alive, and bytes in host memory
    as a tier, during every operator; `host` is empty where none ever are. `writes`, `reads`: of every item. `stalls`:
    how long the step waits in the events where it does, `write_stall_s` and `read_stall_s` in releases and in waits.
    `forwarded`: the items that are still in memory when their loads come, so nothing is read. `idle_lane`: whether one
    of these could have been written while its lane was idle.
    """

    step: Step
    choices: Sequence[Choice]
    schedule: Schedule
    seconds: float
    write_stall_s: float = 0.0
    read_stall_s: float = 0.0
    memory: tuple[int, ...]
    starts: tuple[float, ...] = field(repr=False, default=())
    ends: tuple[float, ...] = field(repr=False, default=())
    host: tuple[int, ...] = ()
    writes: Mapping[int, Span] = field(repr=False, default_factory=dict)
    reads: Mapping[int, Span] = field(repr=False, default_factory=dict)
    stalls: Mapping[Event, float] = field(repr=False, default_factory=dict)
    forwarded: Set[int] = frozenset()
    idle_lane: bool = False

    @property
    def compute_s(self) -> float:
        """The seconds without transfers and recomputing."""
        return sum(self.step.seconds)

    @property
    def stall_s(self) -> float:
        return self.write_stall_s + self.read_stall_s

    @property
    def transfer_s(self) -> float:
        """What the step takes beyond computing and waiting: starting transfers, and computing slower beside them."""
        return max(0.0, self.seconds - self.compute_s - self.write_stall_s - self.read_stall_s)

    @cached_property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def peak_node(self) -> int:
        """The first node of the operator at the peak."""
        return self.step.nodes[self.memory.index(self.peak)][0]

    @property
    def host_peak(self) -> int:
        return max(self.host, default=0)

    @cached_property
    def written(self) -> int:
        """Bytes to the drives, those included whose write the backward may cut short."""
        return sum(self.step.moved[slot] for slot, trip in self.schedule.items() if trip.tier == "ssd")

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept of what can be offloaded or recomputed."""
        return self.step.kept_bytes(self.choices)

    @cached_property
    def waits(self) -> dict[int, float]:
        """Seconds that each item is waited for."""
        waits: dict[int, float] = {}
        for event, seconds in self.stalls.items():
            waits[event.slot] = waits.get(event.slot, 0.0) + seconds
        return waits
