"""How many bytes of stored tensors may be in memory, so that all tensors of a device stay within a limit.

`docs/design.md` ("A limit of memory") has the rule and why it holds. In the words used there, at each node

    held         what the runtime alone holds: released by the graph, and not asked for again
    base         all other bytes that live: `live - held`
    outstanding  what was released and not asked for yet: `held` is at most this

A step that was measured is kept as pairs of `base - level` and `outstanding`, where `level` is the base at its begin.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd_fx.compat import _current_graph_task_id
from ssd_fx.runtime.wear import format_bytes

_log = logging.getLogger("ssd_fx")

REMEMBERED = 4  # steps of a kind and a size
WASTES = 32  # steps whose waste is remembered: a larger allowance may bring it back
SETTLED = 5  # steps in a row that were known before they ran: what they leave is steady
SIZES = 32  # of a kind
POINTS = 10_000  # of a step; then those go that do not bind
MARGIN = 0.01  # of the limit, for what nobody counts: small tensors, and what others take meanwhile
STEADY = 0.01  # of the limit: by less an allowance changes without a word

Kind = tuple[bool, str]
"""A step: whether the optimizer stepped before it, and the graph of its first forward."""
Point = tuple[int, int]


@dataclass(slots=True)
class _Runs:
    """The forwards of a step: how many of each graph, and the most bytes that one of them saves."""

    counts: Counter[str] = field(default_factory=Counter)
    saved: dict[str, int] = field(default_factory=dict)

    def add(self, graph: str, saved: int) -> None:
        self.counts[graph] += 1
        self.saved[graph] = max(self.saved.get(graph, 0), saved)

    def within(self, other: _Runs) -> bool:
        """Whether another step had these forwards, each with as many bytes or more: a smaller batch takes no more."""
        return self.counts <= other.counts and all(nbytes <= other.saved[g] for g, nbytes in self.saved.items())


@dataclass(slots=True)
class _Step:
    """A step while it is measured. `size`: the bytes that its first forward saves. `begun`: outstanding at its begin.
    `complete`: as in `Allowance`."""

    kind: Kind
    size: int
    level: int
    begun: int
    complete: bool
    known: bool = True  # steps with all of its forwards were measured before
    runs: _Runs = field(default_factory=_Runs)
    points: list[Point] = field(default_factory=list)
    peak: int = 0  # of all tensors
    base: int = 0  # the most
    held: int = 0  # the most
    outstanding: int = 0  # the most


class Bound(NamedTuple):
    """At most `nbytes` may be held while `outstanding` bytes or fewer are, and one more for each that is outstanding
    beyond, up to `most`: backwards ask for the latest first, which are held. Fewer than 0: nothing, and it is above the
    limit."""

    nbytes: int
    outstanding: int
    most: int

    def allowed(self, outstanding: int) -> int:
        return self.nbytes + max(0, min(outstanding, self.most) - self.outstanding)


NOTHING = Bound(0, sys.maxsize, 0)  # of a step that was never measured


@dataclass(frozen=True, slots=True)
class _Measured:
    level: int
    runs: _Runs
    begun: int  # outstanding when it began
    points: tuple[Point, ...]  # (base - level, outstanding): those that bind
    most: int  # was outstanding

    def bounds(self, limit: int, level: int, begun: int) -> Iterator[Bound]:
        """What may be held in such a step, so that no point of it is above the limit.

        A level that fell counts only once a step was measured at it: gradients that are gone may come again. What other
        graphs have outstanding when a step begins makes no room for what it stores.
        """
        left, more = limit - max(level, self.level), max(0, begun - self.begun)
        return (
            Bound(left - rise, out + more, self.most + more) for rise, out in self.points if rise + out + more > left
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last step took, in bytes: the most of all tensors, and of what stayed for the backward."""

    limit: int
    peak: int
    stayed: int


@dataclass(frozen=True, slots=True)
class Steady:
    """What steps leave, in bytes: `room` below the limit at their peaks, with nothing held; the least of some steps.

    `runs`: the forwards of the last of them, by graph.
    """

    limit: int
    room: int
    runs: Mapping[str, int]


class Allowance:
    """The allowance under a limit, from forward to forward. All methods run under the lock of `entries`.

    A forward within a backward is a checkpoint's, and begins no step.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bounds: tuple[Bound, ...] = (NOTHING,)
        self.capacity = sys.maxsize  # bytes that the process could have on the device
        self._wastes: deque[int] = deque(maxlen=WASTES)  # of the last steps, as in `wasted`
        self._waste = 0  # in the step that runs
        self.seen: Seen | None = None
        self._left: deque[int] = deque(maxlen=SETTLED)  # what each of the last steps left, as in `Steady`
        self._runs: Mapping[str, int] = {}  # of the last of them
        self._known: dict[Kind, dict[int, deque[_Measured]]] = {}  # by size
        self._step: _Step | None = None
        self._turned = False  # the step's backward has begun
        self._warned = False
        self.complete = True  # what the optimizer keeps is there, so that a step can be told not to fit

    def is_known(self, graph: str, saved: int, optimized: bool, outstanding: int) -> bool:
        """Whether this forward is within a step, or a step that begins so was measured, or one with a larger batch."""
        if not self._is_first(outstanding):
            return True
        return saved <= max(self._known.get((optimized, graph), ()), default=-1)

    def _is_first(self, outstanding: int) -> bool:
        """Whether the forward that begins now is the first of a step."""
        return self._step is None or (_current_graph_task_id() < 0 and (self._turned or not outstanding))

    def begins(self, graph: str, saved: int, base: int, optimized: bool, outstanding: int) -> None:
        """A forward begins, and will save so many bytes, while so many are `outstanding`.

        `optimized`: the optimizer stepped since the last one began. If nothing is outstanding, and no backward came,
        those before are of no step.
        """
        if self._step is None or self._is_first(outstanding):
            self.finish()
            self._step = _Step((optimized, graph), saved, base, outstanding, complete=self.complete)
            self._turned = False
        step = self._step
        step.runs.add(graph, saved)
        known = self._measured(step)
        step.known &= bool(known)
        before, within = self.most, self._within
        found = tuple(bound for each in known for bound in each.bounds(within, step.level, step.begun))
        self.bounds = found if known else (NOTHING,)
        if abs(min(self.most, self.limit) - min(before, self.limit)) > STEADY * self.limit:
            said = "all saved tensors" if self.most > self.limit else format_bytes(self.most)
            _log.info("within memory=%s %s may now stay in memory", format_bytes(self.limit), said)

    def allowed(self, outstanding: int) -> int:
        """The most bytes that may be held while so many are outstanding."""
        return max(0, min((bound.allowed(outstanding) for bound in self.bounds), default=sys.maxsize))

    @property
    def most(self) -> int:
        """What may be held when most bytes are outstanding."""
        return self.allowed(sys.maxsize)

    @property
    def _within(self) -> int:
        """What all tensors may take: the limit is one of tensors, and the device has room for what is wasted beside."""
        return int((1 - MARGIN) * min(self.limit, self.capacity - max(self._waste, *self._wastes, 0)))

    def wasted(self, nbytes: int) -> None:
        """In the step that runs the device's allocator had so many bytes that it could not use. The most of the last
        steps counts: what rests changes it, so that an allowance by the last step alone would go up and down."""
        self._waste = max(self._waste, nbytes)

    def steady(self) -> Steady | None:
        """What the last steps left, if all were known before they ran; None until as many more have run."""
        if len(self._left) < SETTLED:
            return None
        found = Steady(self.limit, min(self._left), self._runs)
        self.unsettle()
        return found

    def unsettle(self) -> None:
        """What the last steps left says nothing of the next ones."""
        self._left.clear()

    def note(self, peak: int, held: int, outstanding: int) -> None:
        """At most `peak` bytes lived since the last node, while `held` of them were held."""
        step = self._step
        if step is None:
            return
        step.peak = max(step.peak, peak)
        step.base = max(step.base, peak - held)
        step.held = max(step.held, held)
        step.outstanding = max(step.outstanding, outstanding)
        if outstanding:
            step.points.append((peak - held - step.level, outstanding))
        if len(step.points) > POINTS:  # a step without an end: outputs that live on, and no backward
            step.points = list(_binding(step.points))

    def turns(self) -> None:
        """The backward of the step loads a tensor."""
        self._turned = True

    def finish(self) -> None:
        """The step is over, with all that the loop did behind its backward."""
        step, self._step = self._step, None
        if step is None:
            return
        self.seen = Seen(self.limit, step.peak, step.held)
        self._wastes.append(self._waste)
        self._waste = 0
        if self._turned:
            measured = _Measured(step.level, step.runs, step.begun, _binding(step.points), step.outstanding)
            sizes = self._known.setdefault(step.kind, {})
            sizes.setdefault(step.size, deque(maxlen=REMEMBERED)).append(measured)
            if len(sizes) > SIZES:
                del sizes[min(sizes)]  # those of a larger batch count for it from here on
            if step.known:
                self._left.append(self._within - step.base)
                self._runs = step.runs.counts
            else:
                self.unsettle()
        if step.base > self.limit and step.complete and not self._warned:
            self._warned = True
            over = step.base - self.limit
            warnings.warn(
                f"memory={format_bytes(self.limit)} cannot be kept: a step needs {format_bytes(over)} more, though "
                f"nothing stays for its backward. {format_bytes(step.level)} were there before it: parameters, "
                "gradients, the optimizer's state and what else the process holds, which ssd_fx does not move. "
                "Training goes on with the lowest peak. A smaller micro-batch, a loss in chunks, sharding or an "
                "optimizer with less state would help",
                RuntimeWarning,
                stacklevel=2,
            )

    def _measured(self, step: _Step) -> list[_Measured]:
        """Steps of its kind, of the least size that is not smaller, which had its forwards."""
        sizes = self._known.get(step.kind, {})
        for size in sorted(size for size in sizes if size >= step.size):
            found = [each for each in sizes[size] if step.runs.within(each.runs)]
            if found:
                return found
        return []


def _binding(points: Iterable[Point]) -> tuple[Point, ...]:
    """Those that bind under some limit.

    Of two points the one with the higher base binds more until as much is outstanding as at the other. From there on it
    does so too, unless base and outstanding bytes together are more at the other.
    """
    found: list[Point] = []
    for rise, out in sorted(points, reverse=True):
        if not found or rise + out > sum(found[-1]):
            found.append((rise, out))
    return tuple(found)
