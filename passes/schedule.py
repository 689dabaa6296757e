"""The schedule of a step, and how the step then runs.

    Schedule   the events of the groups that are offloaded, in the order in which they run
    Replay     the step with a schedule in it: when everything happens, what is in memory, who waits

    forward    produced [store] ........ [release] last_use          store, release: behind their place on the axis
    backward   [load] .... [wait] first_use ........ last_bwd_use    load, wait: before it

`axis.py` has the step and its places.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ssd_fx.passes.axis import Choice, Item, Step

if TYPE_CHECKING:
    from ssd_fx.options import Tier

Interval = tuple[float, float]  # begin and end, in seconds


class Kind(enum.IntEnum):
    """The events of a group, in their order."""

    STORE = 0
    RELEASE = 1
    LOAD = 2
    WAIT = 3


STORE, RELEASE, LOAD, WAIT = Kind


class Event(NamedTuple):
    """One node of ours. A store or a release stands behind the place `at`, a load or a wait before it.

    `slot`: the slot of the group; in the planner, the index of the item. `tier`: where the bytes are between store and
    load. `flag` of a store: it is *later*, so the write begins only if another forward begins before the load. `flag`
    of a release: it *blocks*, so it waits for the write, because the budget needs the memory here. `flag` of a load: it
    is *strict*, because the budget has no memory for an earlier one.
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
        """The trip with other places for the events named in `places`. If they are given, `block` and `strict` are the
        flags of its release and of its load."""
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

    At one place stores come before releases, and loads before waits. Stores whose release blocks come first among the
    stores; the next key is the forward's last read of the group. Loads are in the order of their waits. Releases, waits
    and ties are in the order of slots. An event's position in `forward` or `backward` is its planned sequence number.
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
        """The schedule of the trips that `edit` returns for the trips of this one."""
        return Schedule([edit(slot, trip) for slot, trip in self.items()], items)


EMPTY = Schedule()


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How a step runs with these choices and this schedule, as far as that is predicted (`planner/replay.py`).

    Times are seconds from the start of the step. Bytes are above the level before it: parameters do not count.

    `seconds`: the time of the step, on the host if that takes longer than the device. `starts` and `ends` have the
    times of every operator; `starts` has the end of the step too. `memory` has the bytes alive during every operator,
    `host` those in host memory as a tier; `host` is empty if that is never used. `writes` and `reads` have the
    transfers by item. `stalls`: how long the step waits, by event; `write_stall_s` sums up the waits in releases,
    `read_stall_s` those in waits. `forwarded`: the items that are still in memory when their loads come, so nothing is
    read. `idle_lane`: whether one of these could have been written while its lane was idle.
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
    writes: Mapping[int, Interval] = field(repr=False, default_factory=dict)
    reads: Mapping[int, Interval] = field(repr=False, default_factory=dict)
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
        """Seconds beyond `compute_s` and waits: to start transfers, compute slower beside them, recompute, launch."""
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
        """Bytes written to the drives, including writes that the backward may cut short."""
        return sum(self.step.moved[slot] for slot, trip in self.schedule.items() if trip.tier == "ssd")

    @property
    def kept_bytes(self) -> int:
        """Bytes of the items that are kept although they could be offloaded or recomputed."""
        return self.step.kept_bytes(self.choices)

    @cached_property
    def stays(self) -> int:
        """Bytes of items that could leave, but are in memory when the backward begins: kept, or not written yet."""
        turn = self.starts[self.step.forward]
        late = (i for i, trip in self.schedule.items() if not trip.blocks and self.writes[i][1] > turn)
        return self.kept_bytes + sum(self.step.nbytes[i] for i in late)

    @cached_property
    def waits(self) -> dict[int, float]:
        """Seconds that each item is waited for."""
        waits: dict[int, float] = {}
        for event, seconds in self.stalls.items():
            waits[event.slot] = waits.get(event.slot, 0.0) + seconds
        return waits
