"""When a device came to our nodes: where it runs behind the host, the trace alone has the times of launches.

An event of the compute stream goes before and one behind every node, in the first `RUNS` runs of each node and in one
of so many afterwards. They are read once they have fired; nothing waits for them but who asks for the times. The device
of a graph is known from its first store on, so its first run lacks `begin`.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

import torch

from ssd_fx.runtime import trace
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.clock import anchor

RUNS = 16
UNREAD = 256  # so many nodes may wait to be read; beyond it the oldest is looked at whenever another comes

_lock = threading.Lock()
_unread: deque[Node] = deque()
_read: deque[trace.Event] = deque(maxlen=trace.LENGTH)
_devices: dict[str, torch.device] = {}
_runs: dict[tuple[str, str, int], int] = {}  # by graph, kind and seq: many forwards may run before a backward


class Node:
    """A context: one of our nodes on a device with streams."""

    __slots__ = ("_anchor", "_began", "_device", "_ended", "_named", "_streams")

    def __init__(
        self, found: streams.Streams, device: torch.device, kind: str, graph: str, slot: int, seq: int
    ) -> None:
        self._streams, self._device, self._named = found, device, (kind, graph, slot, seq)
        self._anchor = anchor(found, device)

    def __enter__(self) -> None:
        self._began = self._streams.record(self._streams.current(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error:
            return
        self._ended = self._streams.record(self._streams.current(self._device))
        with _lock:
            _unread.append(self)
            if len(_unread) > UNREAD:
                _read_fired(1)

    def fired(self) -> bool:
        """Whether the device is past it."""
        with self._streams.on(self._device):
            return self._ended.query()

    def wait(self) -> None:
        """Returns when the device is past it."""
        with self._streams.on(self._device):
            self._ended.synchronize()

    def event(self) -> trace.Event:
        """With the device's times, once it has fired."""
        times = self._anchor.when(self._began), self._anchor.when(self._ended)
        return (*self._named, *times, 0, str(self._device), "")


class _Untimed:
    """Instead of a `Node`, where the host's times are the device's, or there are enough."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        return


_UNTIMED = _Untimed()


def node(kind: str, graph: str, slot: int, seq: int, device: torch.device | None) -> Node | _Untimed:
    """The context of a node; `kind` as in the trace. `device`: its tensor's; without streams the graph's counts."""
    if device is None or streams.of(device) is None:
        device = _devices.get(graph)
    found = streams.of(device) if device else None
    if device is None or found is None:
        return _UNTIMED
    _devices.setdefault(graph, device)
    if kind == "store":
        _runs.setdefault((graph, "begin", -1), 1)  # it passed before the device was known
    run = _runs.get((graph, kind, seq), 0)
    _runs[graph, kind, seq] = run + 1
    return Node(found, device, kind, graph, slot, seq) if run < RUNS or run % RUNS == 0 else _UNTIMED


def behind_the_host(graph: str) -> bool:
    """Whether `graph` has run on a device with streams."""
    return graph in _devices


def events() -> list[trace.Event]:
    """The nodes that were timed, every graph's in order; `nbytes` is 0, `where` the device. Waits for the device."""
    with _lock:
        waiting = list(_unread)
    for each in waiting:  # without the lock: others go on
        each.wait()
    with _lock:
        _read_fired(len(waiting))
        return list(_read)


def clear() -> None:
    """Forgets all times, and begins to take them again; in the child of a fork too."""
    global _lock
    _lock = threading.Lock()
    _unread.clear()
    _read.clear()
    _devices.clear()
    _runs.clear()


def _read_fired(most: int) -> None:
    """Reads the oldest, as far as they have fired. Called under the lock."""
    while most and _unread and _unread[0].fired():
        _read.append(_unread.popleft().event())
        most -= 1
