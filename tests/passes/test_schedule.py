"""A schedule holds its events in the order in which they run, and none of a group out of order."""

from __future__ import annotations

import pytest

from ssd_fx.passes.axis import Item
from ssd_fx.passes.schedule import Kind, Schedule, ScheduleError, Trip

ITEMS = [Item(8, 0, last_use, 9, 9) for last_use in (2, 1, 1)]


def test_at_one_place_the_order_is_that_of_need() -> None:
    """All are stored behind 0 and released behind 3: first the one that blocks, then the soonest free to go."""
    loaded = [Trip.of(i, 0, 3, 5, wait, block=i == 0) for i, wait in enumerate((8, 7, 6))]
    schedule = Schedule(reversed(loaded), ITEMS)
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
    schedule = Schedule([Trip.of(0, 0, 1, 2, 3), Trip.of(1, 1, 1, 2, 2)], ITEMS)
    named = [(event.kind, event.slot) for event in schedule.events]
    assert named[:4] == [(Kind.STORE, 0), (Kind.STORE, 1), (Kind.RELEASE, 0), (Kind.RELEASE, 1)]
    assert named[4:] == [(Kind.LOAD, 1), (Kind.LOAD, 0), (Kind.WAIT, 1), (Kind.WAIT, 0)]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ({"release": 0}, "stored behind 1, released behind 0,"),
        ({"wait": 4}, "loaded before 5 and waited for before 4,"),
        ({"release": 5}, "released behind 5, loaded before 5"),
    ],
)
def test_events_of_a_group_that_are_out_of_order_are_refused(places: dict[str, int], found: str) -> None:
    good = Trip.of(4, store=1, release=3, load=5, wait=6)
    with pytest.raises(ScheduleError, match=f"slot 4 is .*{found}.* which is no order"):
        Schedule([good.moved(**places)], {4: ITEMS[0]})


def test_a_group_with_two_trips_is_refused() -> None:
    with pytest.raises(ScheduleError, match="several trips"):
        Schedule([Trip.of(0, 1, 3, 5, 6), Trip.of(0, 2, 3, 5, 6)], ITEMS)
