"""What it takes that a device's memory goes back in the order of its stream, as copies to host memory end.

    forward    [store] ~~ the copy ~~ [release]   in_order: the release stands where the copy is to have ended
    backward   ~~ the copy ~~ [event]             gone_by: what is written there only goes at a node of others
               [load] ~~                          begin_later: a copy that the load would find under way is no use

The host runs far ahead of its device. It would find most copies under way, and hold their tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ssd_fx.passes.axis import Choice
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.planner.off_plan import end_of_room, room_under
from ssd_fx.passes.schedule import Replay, Schedule, Trip


def in_order(found: Replay) -> Schedule:
    """The schedule, with the releases where the copies are to have ended in the forward.

    A device's memory goes back in the order of its stream, which waits there for a copy that is late. The host runs far
    ahead: without such a release it would find most copies under way, and hold their tensors. This is for copies only,
    which nobody but the stream waits for. The host would wait for a drive, and so for what finds no room in host memory
    before one. Copies that end in the backward have no release there: see `gone_by`.
    """

    def edit(i: int, trip: Trip) -> Trip:
        ended = bisect_left(found.starts, found.writes[i][1]) - 1
        if i in found.forwarded or trip.blocks or ended >= found.step.forward:
            return trip
        return trip.moved(release=max(trip.release.at, ended), block=True)

    return found.schedule.edited(edit, found.step.items)


def gone_by(found: Replay, schedule: Schedule, limit: float) -> dict[int, int]:
    """Where the memory goes of what is written in the backward only, if others need it: by slot the event of the
    backward, as its position in the schedule.

    That is as late as the limit of memory allows, and not before it is to be written. The stream waits there for a copy
    that is late. Writes to a drive are not waited for there. `schedule`: on the axis of nodes.
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
    """The slots of what would be copied to host memory in vain: its load comes before the copy has ended.

    Its memory is never free within the step. A copy in a stream cannot be cut short, as a write to a drive can. So it
    begins only if another forward comes before the backward. A mark that binds is obeyed at once. Floats under a lossy
    codec are encoded at once, lest their bits depend on other forwards.
    """
    groups = {g.slot: g for g in plan.groups}
    later = set()
    for i in found.forwarded:
        slot, is_copied = found.step.slots[i], options.copies_only or found.schedule[i].tier == "host"
        lossy = options.lossy and groups[slot].stored.dtype.is_floating_point
        if is_copied and not lossy and Choice.KEEP in found.step.items[i].choices:
            later.add(slot)
    return later
