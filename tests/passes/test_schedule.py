"""A schedule holds its events in the order in which they run, and none of a group out of order."""

from __future__ import annotations

import pytest

from ssd_fx.passes.schedule import Item, Kind, Schedule, ScheduleError, Trip

ITEMS = [Item(8, 0, last_use, 9, 9) for last_use in (2, 1, 1)]


def test_at_one_place_the_order_is_that_of_need() -> None:
    """All are stored behind 0 and released behind 3: first the one that blocks, then the soonest free to go."""
    loaded = [Trip.of(i, 0, 3, 5, wait, block=i == 0) for i, wait in enumerate((8, 7, 6))]
    schedule = Schedule.of(reversed(loaded), ITEMS)
    named = [(event.kind.name.lower(), event.slot) for event in schedule.events]
    assert named == [
        *(("store", 0), ("store", 1), ("store", 2)),
        *(("release", 0), ("release", 1), ("release", 2)),
        *(("load", 2), ("load", 1), ("load", 0)),
        *(("wait", 2), ("wait", 1), ("wait", 0)),
    ]
    assert (schedule.forward, schedule.backward) == (schedule.events[:6], schedule.events[6:])
    assert dict(schedule) == dict(enumerate(loaded))


def test_what_waits_before_a_place_comes_before_what_is_stored_behind_it() -> None:
    schedule = Schedule.of([Trip.of(0, 0, 1, 2, 3), Trip.of(1, 1, 1, 2, 2)], ITEMS)
    named = [(event.kind, event.slot) for event in schedule.events]
    assert named[:4] == [(Kind.STORE, 0), (Kind.STORE, 1), (Kind.RELEASE, 0), (Kind.RELEASE, 1)]
    assert named[4:] == [(Kind.LOAD, 1), (Kind.LOAD, 0), (Kind.WAIT, 1), (Kind.WAIT, 0)]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ({"release": 0}, "release, store, load, wait"),
        ({"load": 7}, "store, release, wait, load"),
        ({"load": 2, "release": 3}, "store, load, release, wait"),
    ],
)
def test_events_of_a_group_that_are_out_of_order_are_refused(places: dict[str, int], found: str) -> None:
    good = Trip.of(4, store=1, release=3, load=5, wait=6)
    with pytest.raises(ScheduleError, match=f"slot 4 has {found}; right would be store, release, load, wait"):
        Schedule.of([good.moved(**places)], {4: ITEMS[0]})


def test_an_event_that_is_missing_or_there_twice_is_refused() -> None:
    trip = Trip.of(0, 1, 3, 5, 6)
    with pytest.raises(ScheduleError, match="slot 0 has store, release, load; right"):
        Schedule(trip[:3])
    with pytest.raises(ScheduleError, match="slot 0 has store, store, release, load, wait; right"):
        Schedule((trip.store, *trip))
