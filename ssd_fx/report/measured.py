"""The last whole step among the events of the runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ssd_fx.runtime.trace import Event

_BACKWARD = ("load", "wait")
LEAST_S = 2e-5  # a shorter wait is the price of the call


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step: its events, with times in seconds from the begin of its first forward.

    turn_s: the first load, which is where the backward has begun. end_s: the begin of the next step; if there is none,
    the end of the last event.
    """

    events: tuple[Event, ...]
    turn_s: float
    end_s: float

    @property
    def order(self) -> tuple[str, ...]:
        """The graphs, as their forwards began. A forward within a backward counts if there was no other."""
        forwards = [event.graph for event in self.events if event.kind == "begin" and event.step]
        again = Counter(event.graph for event in self.events if event.kind == "begin" and not event.step)
        return (*forwards, *reversed([*(again - Counter(forwards)).elements()]))

    @property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Bytes of live tensors above those at the begin, behind every op; empty where they are not counted."""
        ops = [event for event in self.events if event.live]
        return tuple((event.ended, event.live - ops[0].live) for event in ops)

    @property
    def waits(self) -> tuple[Event, ...]:
        """The ops that waited for a transfer, each from when it began to wait."""
        return tuple(e._replace(started=e.ended - e.waited) for e in self.events if e.waited > LEAST_S)

    def transfers(self, kind: str) -> tuple[Event, ...]:
        """The writes or the reads."""
        return tuple(event for event in self.events if event.kind == kind)


def last_step(events: Iterable[Event]) -> MeasuredStep | None:
    """The last step of `events` that another one follows, or else the only one; None if no forward began.

    A step is what `runtime.step_clock` takes for one, so also one of graphs that keep everything and load nothing. Of a
    device only some steps have their transfers (`runtime.device.device_trace`): the last of these is taken, if there
    is one.
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
        return _step(ordered[begins[0] :], None)
    bounds = list(pairwise(begins))
    first, end = next((each for each in reversed(bounds) if _is_timed(ordered[slice(*each)])), bounds[-1])
    return _step(ordered[first:end], ordered[end].started)


def _is_timed(events: Sequence[Event]) -> bool:
    """Whether the transfers of a step are among its events, if it had any."""
    return any(e.kind in ("write", "read") for e in events) or not any(e.where == "disk" for e in events)


def _step(events: Sequence[Event], end: float | None) -> MeasuredStep:
    zero = events[0].started
    shifted = tuple(e._replace(started=e.started - zero, ended=e.ended - zero) for e in events)
    last = max(e.ended for e in shifted) if end is None else end - zero
    turn = next((e.started for e in shifted if e.kind in _BACKWARD), last)
    return MeasuredStep(shifted, turn, last)
