"""Which of the offloaded items go to host memory, under a budget of bytes there.

Host memory is fullest at the end of the forward, because all that is offloaded is there or on the drive then. So items
fit if their sizes add up to the budget at most. How much time a choice saves is harder to say: each write delays all
later ones, and each read too. So the search compares a few ways to fill the room. Then single items change places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.schedule import Replay

SWAPS = 4  # try so many items that could make room in host memory for another
GONE = (Choice.OFFLOAD, Choice.DEFER)
Hosted = frozenset[int]  # the items in host memory, where they are offloaded


def fillings(step: Step, choices: Sequence[Choice], waits: Mapping[int, float]) -> Iterable[Hosted]:
    """Ways to fill host memory: the largest items that fit; those that are waited for longest per byte.

    `waits`: seconds that each item is waited for if all items with a choice of tier are on the drive.
    """
    return dict.fromkeys((_largest(step, choices), _longest_waited_for(step, choices, waits)))


def exchanges(now: Replay) -> Iterator[Hosted]:
    """Fillings with one item in the other tier, the longest waited for first. If need be, another makes room for it."""
    step, waits = now.step, now.waits
    hosted = frozenset(i for i, trip in now.schedule.items() if trip.tier == "host")
    free = [i for i in now.schedule if step.items[i].tier is None]
    room = step.host_budget - sum(step.moved[i] for i in hosted)
    for i in sorted(free, key=lambda i: (-waits.get(i, 0.0), i)):
        if i in hosted:
            yield hosted - {i}
        elif step.moved[i] <= room:
            yield hosted | {i}
        else:
            enough = sorted((step.moved[k], k) for k in free if k in hosted and step.moved[k] >= step.moved[i] - room)
            yield from (hosted - {k} | {i} for _, k in enough[:SWAPS])


def bound(step: Step, choices: Sequence[Choice]) -> Hosted:
    """The items that must go to host memory, as far as they fit: first come, first served."""
    must = [i for i, item in enumerate(step.items) if item.tier == "host" and choices[i] in GONE]
    return _filled(step, frozenset(), must)


def _largest(step: Step, choices: Sequence[Choice]) -> Hosted:
    """The largest items that fit: fewest bytes are left for the drive."""
    order = sorted(_free(step, choices), key=lambda i: (-step.moved[i], i))
    return _filled(step, bound(step, choices), order)


def _longest_waited_for(step: Step, choices: Sequence[Choice], waits: Mapping[int, float]) -> Hosted:
    def key(i: int) -> tuple[float, int, int]:
        nbytes = step.moved[i]
        return -waits.get(i, 0.0) / max(nbytes, 1), -nbytes, i

    return _filled(step, bound(step, choices), sorted(_free(step, choices), key=key))


def _free(step: Step, choices: Sequence[Choice]) -> list[int]:
    """The offloaded items that may go to either tier."""
    return [i for i, item in enumerate(step.items) if choices[i] in GONE and item.tier is None]


def _filled(step: Step, hosted: Hosted, order: Sequence[int]) -> Hosted:
    """The items `hosted`, and those that fit beside them, taken in `order`."""
    chosen, room = set(hosted), step.host_budget - sum(step.moved[i] for i in hosted)
    for i in order:
        nbytes = step.moved[i]
        if nbytes <= room:
            chosen.add(i)
            room -= nbytes
    return frozenset(chosen)
