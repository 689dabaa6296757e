"""What happened and when: the last events, as tuples.

    (kind, graph, slot, seq, started, ended, nbytes, where, engine)

`kind`: "begin", "store", "release", "load", "wait" for the ops, "write" and "read" for finished transfers. Times are
those of time.perf_counter, in seconds: of ops, when the host came to them (`device_trace` has when a device did).
`where`: the place of the bytes ("memory", "disk", "none"), or how a transfer ended ("ok", "failed", "cancelled").
`engine`: its name, empty for "begin". An append costs about 0.2 us.
"""

from collections import deque

Event = tuple[str, str, int, int, float, float, int, str, str]

LENGTH = 65536
# By graph: where in the forward begin_ and our nodes stand, `|`, where in the backward; indices of the graph's nodes
# before ours came, in planned order.
positions: dict[str, str] = {}
_events: deque[Event] = deque(maxlen=LENGTH)

record = _events.append


def transfer(
    kind: str, graph: str, slot: int, seq: int, span: tuple[float, float], nbytes: int, how: str, engine: str
) -> None:
    """Records a transfer, if it ever began: what did not has no times."""
    if span[1]:
        record((kind, graph, slot, seq, *span, nbytes, how, engine))


def events() -> list[Event]:
    """The recorded events, oldest first; the last `LENGTH` of them."""
    return list(_events)


def clear() -> None:
    """Forgets all events and positions."""
    _events.clear()
    positions.clear()
