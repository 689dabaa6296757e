"""Where a device frees tensors that it has copied to host memory: at places in the order of its stream.

    forward    [store] ~~ the copy ~~ [release]   in_order: the release stands where the copy is predicted to have ended
    backward   ~~ the copy ~~ [event]             gone_by: a copy that ends in the backward has no release of its own
               [load] ~~                          begin_later: a copy that has not ended when its load comes is no use

The host runs far ahead of its device. Without such places it would find most copies under way, and hold their tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ssd_fx.passes.axis import Choice
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.planner.off_plan import end_of_room, room_under
from ssd_fx.passes.schedule import Replay, Schedule, Trip


def in_order(found: Replay) -> Schedule:
    """The schedule, with blocking releases where copies are predicted to have ended, if that is in the forward.

    If a copy is late, the stream waits for it at its release, and not the host. So this is only for steps without
    drives: the host would wait for a drive, also for a tensor that finds no room in the host memory before the drive.
    For copies that end in the backward see `gone_by`.
    """

    def edit(i: int, trip: Trip) -> Trip:
        ended = bisect_left(found.starts, found.writes[i][1]) - 1
        if i in found.forwarded or trip.blocks or ended >= found.step.forward:
            return trip
        return trip.moved(release=max(trip.release.at, ended), block=True)

    return found.schedule.edited(edit, found.step.items)


def gone_by(found: Replay, schedule: Schedule, limit: float) -> dict[int, int]:
    """For slots whose writes end in the backward: the event there at which their memory goes, if other tensors need it
    before the load. The event is given by its position in the schedule.

    It is as late as the limit of memory allows, and not before the write is predicted to end. If a copy is late, the
    stream waits for it there. Writes to a drive are not waited for there. `schedule`: on the axis of nodes.
    """
    events, gone = schedule.backward, dict[int, int]()
    step, places, room = found.step, [event.at for event in events], room_under(found, limit)
    for i in sorted(found.schedule, key=lambda i: found.writes[i][1], reverse=True):
        trip, nbytes, own = found.schedule[i], step.nbytes[i], schedule[step.slots[i]]
        ended = bisect_left(found.starts, found.writes[i][1]) - 1  # the operator during which it is written
        if trip.blocks or own.is_later or i in found.forwarded or ended < step.forward:
            continue
        until = end_of_room(room, ended + 1, trip.load.at, nbytes)
        room[ended + 1 : until] -= nbytes
        first = bisect_right(places, step.nodes[ended][1])
        event = max(first, bisect_right(places, step.nodes[until][0]) - 1)
        if until < trip.load.at and event < events.index(own.load):
            gone[own.slot] = event
    return gone


def begin_later(plan: Plan, found: Replay, options: PlanOptions) -> set[int]:
    """The slots of groups that would be copied to host memory in vain: their loads come before the copies have ended.

    Such a copy frees no memory within the step, and it cannot be cut short in its stream, as a write to a drive can. So
    it begins only if another forward comes before the backward. Groups that a mark offloads are copied at once. So are
    floats under a lossy codec, as their bits would depend on other forwards otherwise.
    """
    groups = {g.slot: g for g in plan.groups}
    later = set()
    for i in found.forwarded:
        slot, is_copied = found.step.slots[i], options.copies_only or found.schedule[i].tier == "host"
        lossy = options.lossy and groups[slot].stored.dtype.is_floating_point
        if is_copied and not lossy and Choice.KEEP in found.step.items[i].choices:
            later.add(slot)
    return later
