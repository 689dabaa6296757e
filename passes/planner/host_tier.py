"""Which of the offloaded items go to host memory, under a budget of bytes there.

All that is offloaded is out of the device's memory at the end of the forward, so host memory is fullest there, and what
fits is a matter of a sum. What the drive is relieved of is not: a write delays all writes behind it, and a read all
reads behind it. So there are a few ways to fill the room, the simulator says which is best, and then single items
change places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cmp_to_key

from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.refine import TOLERANCE, Solution, better
from ssd_fx.passes.planner.simulate import Choice, Step, Transfer

FILLINGS = 2  # tried for all choices; all are tried for the best
VARIED = 4  # so many fillings have single items change places
SWAPS = 4  # so many items are tried that could make room in host memory for another
Hosted = frozenset[int]  # the items in host memory, where they are offloaded
Play = Callable[[Hosted], Solution | None]  # given choices with those in host memory; None: not within the limit


def filled(step: Step, machine: Machine, choices: Sequence[Choice], play: Play) -> Solution | None:
    """The best of a few fillings, and of none but what is bound to host memory."""
    best = play(bound(step, choices))
    if not step.host_budget or best is None:
        return best
    for hosted in itertools.islice(fillings(step, choices, best.outcome.waits, machine), FILLINGS):
        found = play(hosted)
        if found is not None and better(found.outcome, best.outcome):
            best = found
        if best.outcome.stall_s <= TOLERANCE * best.outcome.seconds:
            break  # others hardly write less
    return best


def varied(
    step: Step, machine: Machine, choices: Sequence[Choice], play: Play, more: Callable[[], bool]
) -> list[Solution]:
    """Good fillings of all kinds, from each of which no exchange of single items leads further.

    Not only the best, since they are there to be refined. `more`: whether there is effort left.
    """
    drive = play(bound(step, choices))
    if drive is None:
        return []
    played = (play(hosted) for hosted in fillings(step, choices, drive.outcome.waits, machine))
    found = sorted((s for s in played if s is not None), key=cmp_to_key(_worse))
    return [_exchanged(step, start, play, more) for start in found[:VARIED]]


def _worse(a: Solution, b: Solution) -> int:
    return better(b.outcome, a.outcome) - better(a.outcome, b.outcome)


def _exchanged(step: Step, now: Solution, play: Play, more: Callable[[], bool]) -> Solution:
    moved = True
    while moved:
        moved = False
        for hosted in exchanges(step, now.transfers, now.outcome.waits):
            if not more():
                return now
            found = play(hosted)
            if found is not None and better(found.outcome, now.outcome):
                now, moved = found, True
                break
    return now


def fillings(step: Step, choices: Sequence[Choice], waits: Mapping[int, float], machine: Machine) -> Iterator[Hosted]:
    """Ways to fill host memory, each once: of what is offloaded, in some order, all that fits.

    First the one that leaves fewest bytes to the drive. `waits`: seconds that each item is waited for if all that is
    free goes there. What is bound to host memory comes before all others. Less than all room is filled too: so far that
    both lanes take as long, and a half and a quarter, since items that fit into these may be better than a large one.
    """
    items = step.items
    sizes = {i: items[i].moved_nbytes for i, c in enumerate(choices) if c is Choice.OFFLOAD and items[i].tier != "ssd"}
    always = bound(step, choices)
    free, room = [i for i in sizes if items[i].tier is None], step.host_budget - sum(sizes[i] for i in always)
    orders: tuple[Callable[[int], tuple[float, ...]], ...] = (
        lambda i: (-sizes[i], i),
        lambda i: (-waits.get(i, 0.0) / max(sizes[i], 1), -sizes[i], i),  # longest waited for
        lambda i: (items[i].produced, items[i].last_use, i),  # first in the way of the other writes
        lambda i: (items[i].first_use, -items[i].produced, i),  # first in the way of the other reads
        lambda i: (sizes[i], i),  # as many as can be, which may be more bytes than a large one and what fits beside it
    )
    found: set[Hosted] = set()
    for within in (room, min(room, _even(sum(sizes.values()), machine)), room / 2, room / 4):
        for order in orders:
            hosted = always | _filled(sizes, sorted(free, key=order), within)
            if hosted not in found:
                found.add(hosted)
                yield hosted


def bound(step: Step, choices: Sequence[Choice]) -> Hosted:
    """What must go to host memory as far as it fits, first come, first served."""
    sizes = {i: item.moved_nbytes for i, item in enumerate(step.items) if item.tier == "host"}
    return _filled(sizes, [i for i in sizes if choices[i] is Choice.OFFLOAD], step.host_budget)


def _filled(sizes: Mapping[int, int], order: Sequence[int], room: float) -> Hosted:
    hosted = []
    for i in order:
        if sizes[i] <= room:
            hosted.append(i)
            room -= sizes[i]
    return frozenset(hosted)


def _even(nbytes: int, machine: Machine) -> float:
    """What of `nbytes` the host takes while the drive takes the rest, forth or back, whichever is more."""
    host, drive = machine.lanes("host"), machine.lanes("ssd")
    shares = host.write_bw / (host.write_bw + drive.write_bw), host.read_bw / (host.read_bw + drive.read_bw)
    return nbytes * max(shares)


def exchanges(step: Step, transfers: Mapping[int, Transfer], waits: Mapping[int, float]) -> Iterator[Hosted]:
    """One item in the other tier, the longest waited for first; where host memory is full, for one that makes room."""
    hosted = frozenset(i for i, t in transfers.items() if t.tier == "host")
    sizes = {i: step.items[i].moved_nbytes for i in transfers}
    free = [i for i in transfers if step.items[i].tier is None]
    room = step.host_budget - sum(sizes[i] for i in hosted)
    for i in sorted(free, key=lambda i: (-waits.get(i, 0.0), i)):
        if i in hosted:
            yield hosted - {i}
        elif sizes[i] <= room:
            yield hosted | {i}
        else:
            enough = sorted((sizes[k], k) for k in free if k in hosted and sizes[k] >= sizes[i] - room)
            yield from (hosted - {k} | {i} for _, k in enough[:SWAPS])
