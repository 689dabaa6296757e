"""How many bytes of stored tensors may be in memory, so that all tensors of a device stay within a limit.

`docs/design.md` ("A limit of memory") has the rule and why it holds. In the words used there, at each node

    held         bytes that the runtime alone holds: the graph released them, and has not asked for them again
    base         all other bytes that live: `live - held`
    outstanding  bytes released and not asked for yet, in memory or not: `held` is at most this

A measured step is kept as points (`base - level`, `outstanding`), where `level` is the base when the step began.
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

REMEMBERED = 4  # measured steps, of each kind and size
WASTES = 32  # steps whose waste is remembered: a larger allowance may bring it back
SETTLED = 5  # steps in a row that were known before they ran: the memory that they leave is then steady
SIZES = 32  # remembered sizes of each kind of step
POINTS = 10_000  # of a step; beyond that, those that do not bind are dropped
MARGIN = 0.01  # of the limit, for what nobody counts: small tensors, and what others take meanwhile
STEADY = 0.01  # of the limit: a smaller change of the allowance is not logged

Kind = tuple[bool, str]
"""The kind of a step: whether the optimizer stepped before it, and the graph of its first forward."""
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
        """Whether `other` had these forwards, each with as many bytes or more: a smaller batch needs no more memory."""
        return self.counts <= other.counts and all(nbytes <= other.saved[g] for g, nbytes in self.saved.items())


@dataclass(slots=True)
class _Step:
    """A step while it is measured. `size`: the bytes that its first forward saves. `begun`: bytes outstanding when it
    began. `complete`: as in `Allowance`."""

    kind: Kind
    size: int
    level: int
    begun: int
    complete: bool
    known: bool = True  # whether steps with all of its forwards were measured before
    runs: _Runs = field(default_factory=_Runs)
    points: list[Point] = field(default_factory=list)
    peak: int = 0  # the most bytes of all tensors
    base: int = 0  # the highest base
    held: int = 0  # the most bytes held
    outstanding: int = 0  # the most bytes outstanding


class Bound(NamedTuple):
    """How much may be held: `nbytes` while up to `outstanding` bytes are outstanding, and one byte more for each byte
    beyond, up to `most`. For backwards ask for the latest tensors first, and these are held. `nbytes` below 0: not even
    holding nothing keeps the limit there."""

    nbytes: int
    outstanding: int
    most: int

    def allowed(self, outstanding: int) -> int:
        return self.nbytes + max(0, min(outstanding, self.most) - self.outstanding)


NOTHING = Bound(0, sys.maxsize, 0)  # the bound of a step that was never measured


@dataclass(frozen=True, slots=True)
class _Measured:
    level: int
    runs: _Runs
    begun: int  # bytes outstanding when it began
    points: tuple[Point, ...]  # (base - level, outstanding): the points that bind
    most: int  # the most bytes that were outstanding

    def bounds(self, limit: int, level: int, begun: int) -> Iterator[Bound]:
        """The bounds that keep all points of such a step within the limit, if it begins with `begun` bytes outstanding.

        A lower level counts only once a step was measured at it, because gradients that are gone may come again. Bytes
        of other graphs that are outstanding when a step begins make no room for what it stores.
        """
        left, more = limit - max(level, self.level), max(0, begun - self.begun)
        return (
            Bound(left - rise, out + more, self.most + more) for rise, out in self.points if rise + out + more > left
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last step took, in bytes. `peak`: the most of all tensors. `stayed`: the most held for the backward."""

    limit: int
    peak: int
    stayed: int


@dataclass(frozen=True, slots=True)
class Steady:
    """What the last steps left, in bytes. `room`: the least that was free below the limit at a peak, with nothing held.

    `runs`: how many forwards each graph had in the last of these steps.
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
        self._wastes: deque[int] = deque(maxlen=WASTES)  # the waste of each of the last steps, as in `wasted`
        self._waste = 0  # the waste of the step that runs
        self.seen: Seen | None = None
        self._left: deque[int] = deque(maxlen=SETTLED)  # the room that each of the last steps left, as in `Steady`
        self._runs: Mapping[str, int] = {}  # the forwards of the last of these steps
        self._known: dict[Kind, dict[int, deque[_Measured]]] = {}  # by kind and size
        self._step: _Step | None = None
        self._turned = False  # the step's backward has begun
        self._warned = False
        self.complete = True  # whether the optimizer's state is there: only then can a step be said not to fit

    def is_known(self, graph: str, saved: int, optimized: bool, outstanding: int) -> bool:
        """Whether this forward begins no step, or a step that begins like it, with as large a batch, was measured."""
        if not self._is_first(outstanding):
            return True
        return saved <= max(self._known.get((optimized, graph), ()), default=-1)

    def _is_first(self, outstanding: int) -> bool:
        """Whether the forward that begins now is the first of a step."""
        return self._step is None or (_current_graph_task_id() < 0 and (self._turned or not outstanding))

    def begins(self, graph: str, saved: int, base: int, optimized: bool, outstanding: int) -> None:
        """Records that a forward begins that will save `saved` bytes, and sets the bounds for it.

        `optimized`: the optimizer stepped since the last forward began. If nothing is outstanding and no backward came,
        the forwards before belong to no step.
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
        """The most bytes that may be held while `outstanding` bytes are outstanding."""
        return max(0, min((bound.allowed(outstanding) for bound in self.bounds), default=sys.maxsize))

    @property
    def most(self) -> int:
        """The most bytes that may be held, however many are outstanding."""
        return self.allowed(sys.maxsize)

    @property
    def _within(self) -> int:
        """The bytes that all tensors may take: the limit, or what the device has beside its allocator's waste."""
        return int((1 - MARGIN) * min(self.limit, self.capacity - max(self._waste, *self._wastes, 0)))

    def wasted(self, nbytes: int) -> None:
        """Records bytes that the device's allocator could not use in the step that runs. The most of the last steps
        counts: the waste depends on what stays, so an allowance by the last step alone would go up and down."""
        self._waste = max(self._waste, nbytes)

    def steady(self) -> Steady | None:
        """What the last steps left, if all were known before they ran; afterwards None until as many more have run."""
        if len(self._left) < SETTLED:
            return None
        found = Steady(self.limit, min(self._left), self._runs)
        self.unsettle()
        return found

    def unsettle(self) -> None:
        """Forgets what the last steps left, because it says nothing of the next ones."""
        self._left.clear()

    def note(self, peak: int, held: int, outstanding: int) -> None:
        """Records that at most `peak` bytes lived since the last node, of which `held` were held."""
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
        """Records that the backward of the step loads a tensor."""
        self._turned = True

    def finish(self) -> None:
        """Ends the step, with all that the training loop did after its backward. Remembers it if a backward came."""
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
                del sizes[min(sizes)]  # steps of a larger batch stand in for it from here on
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
        """The measured steps of the same kind that had this step's forwards, at the least size that is not smaller."""
        sizes = self._known.get(step.kind, {})
        for size in sorted(size for size in sizes if size >= step.size):
            found = [each for each in sizes[size] if step.runs.within(each.runs)]
            if found:
                return found
        return []


def _binding(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that bind under some limit.

    Of two points the one with the higher base allows less, until as much is outstanding as at the other. From there on
    the other one allows less if its base and outstanding bytes together are more. Only then it binds, too.
    """
    found: list[Point] = []
    for rise, out in sorted(points, reverse=True):
        if not found or rise + out > sum(found[-1]):
            found.append((rise, out))
    return tuple(found)
