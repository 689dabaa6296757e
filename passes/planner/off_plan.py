"""Keeps memory within its limit even if writes end later, or reads begin earlier, than the plan predicts.

    forward    [store] .... [release] ~~~~~ the write ends late, and the tensor is there until then
    backward   ~~~~~ [load] .... [wait]     the runtime reads early what the graph waited for in the last steps

A plan keeps its limit as long as its predictions hold. They do not where the drive is slower, others use it, or the
graph is faster. So where the limit has no room for it, a release waits for its write, and a load is strict. Neither
takes time in the predicted step. Under "auto" no limit was asked for, and the runtime keeps more while the drive is
slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping

import numpy as np

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.compare import fits
from ssd_fx.passes.planner.place import FloatArray
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.schedule import LOAD, Replay, Trip

# The runtime may read a tensor that was waited for at one of so many loads before its own (`FAR` in
# runtime/adapt/runs.py).
LOADS_AHEAD = 2


def held_to_its_limit(found: Replay, limit: float, machine: Machine, *, late: bool) -> Replay:
    """The step, with releases that block and loads that are strict where memory could be above `limit` otherwise.

    `late`: look at late writes too. Their tensors take memory that a backward needs if it comes next, as that of a
    whole step does. A write that is predicted to end in the backward may still end later.
    """
    room = room_under(found, limit)
    if late and (blocking := _blocking(found, room)):

        def edit(i: int, trip: Trip) -> Trip:
            return trip.moved(release=blocking[i], block=True) if i in blocking else trip

        waiting = replay(found.step, found.choices, found.schedule.edited(edit, found.step.items), machine)
        if fits(waiting, limit):  # stores whose releases block come first, which may move others
            found = waiting
        room = room_under(found, limit)
    strict = _strict(found, room)
    if not strict:
        return found
    schedule = found.schedule.edited(lambda i, trip: trip.moved(strict=True) if i in strict else trip, found.step.items)
    return replay(found.step, found.choices, schedule, machine)


def room_under(found: Replay, limit: float) -> FloatArray:
    """Bytes under the limit during every operator."""
    return limit - np.array(found.memory, dtype=np.float64)


def _blocking(found: Replay, room: FloatArray) -> Mapping[int, int]:
    """The items whose writes may not end later than predicted, and the operators behind which their releases block.

    They are as late as memory allows, so that a write that is a little late is not waited for. The last writes are the
    likeliest to be late, so they get the `room` first.
    """
    step, blocking = found.step, dict[int, int]()
    handed_over = [i for i, trip in found.schedule.items() if i in found.reads and not trip.blocks]
    for i in sorted(handed_over, key=lambda i: found.writes[i][1], reverse=True):
        trip = found.schedule[i]
        gone = max(trip.release.at, bisect_left(found.starts, found.writes[i][1]) - 1)
        until = end_of_room(room, gone + 1, trip.load.at, step.nbytes[i])
        if until < trip.load.at and gone < step.forward:
            until = min(until, step.forward)
            blocking[i] = until - 1
        room[gone + 1 : until] -= step.nbytes[i]
    return blocking


def end_of_room(room: FloatArray, begin: int, end: int, nbytes: int) -> int:
    """The first operator from `begin` on that has no room for so many bytes; `end` if all before that have."""
    short = np.flatnonzero(room[begin:end] < nbytes)
    return begin + int(short[0]) if len(short) else end


def _strict(found: Replay, room: FloatArray) -> Collection[int]:
    """The items whose reads must not begin as early as the runtime may learn to begin them."""
    loads = [event for event in found.schedule.backward if event.kind is LOAD]
    strict = set[int]()
    for k, load in enumerate(loads):
        early, nbytes = loads[max(0, k - LOADS_AHEAD)].at, found.step.nbytes[load.slot]
        if load.flag or load.slot not in found.reads:
            continue
        if end_of_room(room, early, load.at, nbytes) < load.at:
            strict.add(load.slot)
        else:
            room[early : load.at] -= nbytes
    return strict
