"""A training step over time: what happens to each alias group, and the memory.

    forward A   forward B   backward B   backward A

The plan of a graph, PyTorch's own partition, all graphs of a step together (`joined`) and what the runtime recorded
(`measured`) are all a `Timeline`. So one code draws, prints and compares what was predicted and what was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ssd_fx.runtime import trace

_FORWARD = ("store", "release", "write")
LEAST_S = 2e-5  # a shorter wait is the price of the call
UNKNOWN = -1  # run of a measured span: of several runs nobody knows which one it is of

Points = tuple[tuple[float, int], ...]


class Span(NamedTuple):
    """What happens to an alias group, predicted or measured. Times are seconds from the start of the step.

    Attributes:
        kind: a node ("store", "release", "load", "wait") or a transfer ("write", "read"), as in the trace. A prediction
            has store, release and wait of what is kept as well: the group is produced, the forward reads it no more,
            the backward uses it. It also has "last", the last use, and "gone", while the group's memory is free.
        graph, slot: which group.
        run: which run of a graph in the step, counted over all graphs from 0.
        begin, end: one time where the prediction knows no duration.
        waited: seconds until the end for which the step waits for a transfer.
        nbytes: bytes of a transfer that succeeds.
    """

    kind: str
    graph: str
    slot: int
    run: int
    begin: float
    end: float
    waited: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step, or a part of one. Seconds are from its start.

    Attributes:
        order: the graphs as their forwards begin.
        spans: of all groups.
        memory: bytes above the level before the step, from each time on.
        turn_s: when the backward begins.
        end_s: when the last thing ends.
        stays: bytes that are in memory between forward and backward.
        gradients: bytes of gradients that its backward leaves in memory.
        stayed: in a measured step, graph and slot of the groups that were to be stored and stayed in memory.
    """

    order: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    memory: Points = ()
    turn_s: float = 0.0
    end_s: float = 0.0
    stays: int = 0
    gradients: int = 0
    stayed: tuple[tuple[str, int], ...] = ()

    @property
    def peak(self) -> int:
        return max((nbytes for _, nbytes in self.memory), default=0)

    @property
    def waits(self) -> list[Span]:
        """The spans in which nodes wait for a transfer: the last part of each such node."""
        return [span._replace(begin=span.end - span.waited) for span in self.spans if span.waited]

    def of(self, *kinds: str) -> list[Span]:
        """The spans of these kinds."""
        return [span for span in self.spans if span.kind in kinds]

    def times(self) -> dict[tuple[str, int, int], dict[str, Span]]:
        """By graph, slot and run, the spans of the group by kind."""
        found: dict[tuple[str, int, int], dict[str, Span]] = {}
        for span in self.spans:
            found.setdefault((span.graph, span.slot, span.run), {})[span.kind] = span
        return found

    def transfer_rate(self) -> float:
        """Bytes a second of the transfers that succeed, while at least one runs; 0 without any."""
        busy, until = 0.0, -math.inf
        moved = sorted((span for span in self.of("write", "read") if span.nbytes), key=lambda span: span.begin)
        for span in moved:
            busy += max(0.0, span.end - max(span.begin, until))
            until = max(until, span.end)
        return sum(span.nbytes for span in moved) / busy if busy else 0.0


def joined(parts: Sequence[Timeline]) -> Timeline:
    """One step of several parts. Each runs between forward and backward of the one before, above what it left. A
    backward runs above the gradients that the later parts have left."""
    spans: list[Span] = []
    forward: list[tuple[float, int]] = []
    backward: list[tuple[float, int]] = []
    begun_s, level, within_s = 0.0, 0, math.fsum(part.end_s for part in parts)
    behind = sum(part.gradients for part in parts)
    for run, part in enumerate(parts):
        within_s -= part.end_s
        behind -= part.gradients
        turned_s = begun_s + within_s  # by how much its backward comes later
        for span in part.spans:
            begin = span.begin + (begun_s if span.kind in (*_FORWARD, "gone") else turned_s)
            end = span.end + (begun_s if span.kind in _FORWARD else turned_s)
            spans.append(span._replace(run=run, begin=begin, end=end))
        forward += [(at + begun_s, nbytes + level) for at, nbytes in part.memory if at < part.turn_s]
        backward[:0] = [(at + turned_s, nbytes + level + behind) for at, nbytes in part.memory if at >= part.turn_s]
        begun_s, level = begun_s + part.turn_s, level + part.stays
    return Timeline(
        order=tuple(name for part in parts for name in part.order),
        spans=tuple(spans),
        memory=(*forward, *backward),
        turn_s=begun_s,
        end_s=math.fsum(part.end_s for part in parts),
        stays=level,
        gradients=sum(part.gradients for part in parts),
    )


def thinned(points: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """A point for each of at most `most` parts: its begin, and its highest value."""
    size = max(1, -(-len(points) // most))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[0][0], max(nbytes for _, nbytes in part)) for part in parts]


def measured(events: Iterable[trace.Event]) -> Timeline | None:
    """The last complete step of `events`, which another one follows, or else the only one; None if no forward began.

    A step is what `runtime.step_clock` takes for one, so also one of graphs that keep everything and load nothing. On a
    device, the transfers of only some steps are timed (`runtime.device.device_trace`): the last of these steps is
    taken, if there is one.
    """
    ordered = sorted(events, key=lambda event: event.started)
    begins: list[int] = []
    number = 0
    for i, event in enumerate(ordered):
        if event.kind == "begin" and event.step not in (0, number):
            begins.append(i)
            number = event.step
    if not begins:
        return None
    if len(begins) == 1:
        return _recorded(ordered[begins[0] :], None)
    bounds = list(pairwise(begins))
    first, end = next((each for each in reversed(bounds) if _is_timed(ordered[slice(*each)])), bounds[-1])
    return _recorded(ordered[first:end], ordered[end].started)


def _is_timed(events: Sequence[trace.Event]) -> bool:
    """Whether the transfers of a step are among its events, if it had any."""
    return any(e.kind in ("write", "read") for e in events) or not any(e.where == "disk" for e in events)


def _recorded(events: Sequence[trace.Event], next_s: float | None) -> Timeline:
    """A step of these events; `next_s`: when the next one begins."""
    zero, live = events[0].started, [event for event in events if event.live]
    spans = tuple(
        Span(
            *(e.kind, e.graph, e.slot, UNKNOWN, e.started - zero, e.ended - zero),
            waited=e.waited if e.waited > LEAST_S else 0.0,
            nbytes=e.nbytes if e.where == "ok" else 0,
        )
        for e in events
    )
    end = max(span.end for span in spans)
    return Timeline(
        order=_order(events),
        spans=spans,
        memory=tuple((event.ended - zero, event.live - live[0].live) for event in live),
        turn_s=next(
            (span.begin for span in spans if span.kind in ("load", "wait")), end if next_s is None else next_s - zero
        ),
        end_s=end,
        stayed=_stayed(events),
    )


def _stayed(events: Iterable[trace.Event]) -> tuple[tuple[str, int], ...]:
    """The groups that the backward found in memory, and whose transfers never began."""
    moved = {(e.graph, e.slot) for e in events if e.kind in ("write", "read") or e.where == "disk"}
    found = dict.fromkeys((e.graph, e.slot) for e in events if e.kind == "load" and e.where == "memory")
    return tuple(each for each in found if each not in moved)


def _order(events: Sequence[trace.Event]) -> tuple[str, ...]:
    """The graphs, as their forwards began. A forward within a backward counts if there was no other."""
    forwards = [event.graph for event in events if event.kind == "begin" and event.step]
    again = Counter(event.graph for event in events if event.kind == "begin" and not event.step)
    return (*forwards, *reversed([*(again - Counter(forwards)).elements()]))
