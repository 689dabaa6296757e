"""The last events of the runtime."""

from collections import deque
from typing import Any, NamedTuple


class Event(NamedTuple):
    """An op, or a transfer that ended.

    `kind`: "begin", "store", "release", "load" or "wait" for an op, "write" or "read" for a transfer.
    `started`, `ended`: seconds of time.perf_counter. An op's are those of the host; `device_trace` has the device's.
    `where`: the place of the bytes ("memory", "disk", "none", "lost"), or how a transfer ended ("ok", "failed",
    "cancelled"). `engine`: its name, empty for "begin". `live`: bytes of the large CPU tensors alive then; 0 for a
    transfer, and where they are not counted. `waited`: seconds at its end that an op waited for a transfer. `step`: of
    a "begin", the number of its training step by `StepClock`; 0 of a checkpoint's forward, which is in a backward.
    """

    kind: str
    graph: str
    slot: int
    seq: int
    started: float
    ended: float
    nbytes: int
    where: str
    engine: str
    live: int = 0
    waited: float = 0.0
    step: int = 0


LENGTH = 65536
_events: deque[tuple[Any, ...]] = deque(maxlen=LENGTH)

record = _events.append
"""Takes the fields of an `Event` as a tuple; those with defaults may be missing. The objects are made on demand."""


def transfer(
    kind: str, graph: str, slot: int, seq: int, span: tuple[float, float], nbytes: int, how: str, engine: str
) -> None:
    """Records a transfer, unless it was cancelled before it began."""
    if span[1]:  # else it has no times
        record((kind, graph, slot, seq, *span, nbytes, how, engine))


def events() -> list[Event]:
    """The recorded events, oldest first; the last `LENGTH` of them."""
    return [Event(*event) for event in list(_events)]


def clear() -> None:
    """Forgets all events."""
    _events.clear()


def forget(graph: str) -> None:
    """Forgets the events of one graph, as of a measurement that nobody asks for."""
    kept = [event for event in list(_events) if event[1] != graph]
    _events.clear()
    _events.extend(kept)
