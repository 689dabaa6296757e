"""Which of the offloaded items go to host memory, under a budget of bytes there.

Host memory is fullest at the end of the forward, because all that is offloaded is there or on the drive then. So items
fit if their sizes add up to the budget at most. How much time a choice saves is harder to say: each write delays all
later ones, and each read too. So the simulator compares a few ways to fill the room. Then single items change places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ssd_fx.passes.planner.items import Choice, Step, Transfer
from ssd_fx.passes.planner.solution import TOLERANCE, Solution, better

SWAPS = 4  # so many items are tried that could make room in host memory for another
Hosted = frozenset[int]  # the items in host memory, where they are offloaded
Play = Callable[[Hosted], Solution | None]  # given choices with those in host memory; None: not within the limit


def filled(step: Step, choices: Sequence[Choice], play: Play) -> Solution | None:
    """The best of three: in host memory is only what is bound to be there; or also the largest items that fit; or those
    that are waited for longest per byte."""
    best = play(bound(step, choices))
    if not step.host_budget or best is None:
        return best
    waits = best.outcome.waits
    for hosted in dict.fromkeys((_largest(step, choices), _longest_waited_for(step, choices, waits))):
        found = play(hosted)
        if found is not None and better(found.outcome, best.outcome):
            best = found
        if best.outcome.stall_s <= TOLERANCE * best.outcome.seconds:
            break  # others hardly write less
    return best


def exchanged(step: Step, now: Solution, play: Play, more: Callable[[], bool]) -> Solution:
    """The best reached by exchanges of single items, each of which makes the step better. `more`: whether there is
    effort left."""
    moved = True
    while moved:
        moved = False
        for hosted in _exchanges(step, now.transfers, now.outcome.waits):
            if not more():
                return now
            found = play(hosted)
            if found is not None and better(found.outcome, now.outcome):
                now, moved = found, True
                break
    return now


def _exchanges(step: Step, transfers: Mapping[int, Transfer], waits: Mapping[int, float]) -> Iterator[Hosted]:
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


def bound(step: Step, choices: Sequence[Choice]) -> Hosted:
    """What must go to host memory as far as it fits, first come, first served."""
    must = [i for i, item in enumerate(step.items) if item.tier == "host" and choices[i] is Choice.OFFLOAD]
    return _filled(step, frozenset(), must)


def _largest(step: Step, choices: Sequence[Choice]) -> Hosted:
    """The largest items that fit: fewest bytes are left for the drive."""
    order = sorted(_free(step, choices), key=lambda i: (-step.items[i].moved_nbytes, i))
    return _filled(step, bound(step, choices), order)


def _longest_waited_for(step: Step, choices: Sequence[Choice], waits: Mapping[int, float]) -> Hosted:
    """`waits`: seconds that each item is waited for while all that is free is on the drive."""

    def key(i: int) -> tuple[float, int, int]:
        nbytes = step.items[i].moved_nbytes
        return -waits.get(i, 0.0) / max(nbytes, 1), -nbytes, i

    return _filled(step, bound(step, choices), sorted(_free(step, choices), key=key))


def _free(step: Step, choices: Sequence[Choice]) -> list[int]:
    """The offloaded items that may go to either tier."""
    return [i for i, item in enumerate(step.items) if choices[i] is Choice.OFFLOAD and item.tier is None]


def _filled(step: Step, hosted: Hosted, order: Sequence[int]) -> Hosted:
    """`hosted`, and what fits beside it in that order."""
    chosen, room = set(hosted), step.host_budget - sum(step.items[i].moved_nbytes for i in hosted)
    for i in order:
        nbytes = step.items[i].moved_nbytes
        if nbytes <= room:
            chosen.add(i)
            room -= nbytes
    return frozenset(chosen)
