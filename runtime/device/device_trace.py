"""When a device came to our nodes. A device runs behind the host, so `trace` has only the times of the launches.

An event of the compute stream is recorded before and after a node: in the first `RUNS` runs of a store, and then in one
of every `RUNS`. The other nodes of that tensor are timed with it, and so are the transfers that they start.
Events are read once they have fired; only `events` waits for them. The device of a graph is known from
its first store on, so the graph's first run lacks `begin`.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from operator import attrgetter
from types import TracebackType

import torch

from ssd_fx.runtime import trace
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.clock import anchor, timing

RUNS = 16
UNREAD = 256  # nodes: if more wait to be read, each new one reads the oldest if that has fired

_lock = threading.RLock()  # a signal handler that exports the trace may interrupt its holder
_unread: deque[Node] = deque()
_read: deque[trace.Event] = deque(maxlen=trace.LENGTH)
_devices: dict[str, torch.device] = {}
_runs: dict[tuple[str, int], int] = {}  # runs so far, by graph and the seq of a store, or -1


class Node:
    """A context that times one of our nodes on a device with streams. It yields the number of runs it stands for."""

    __slots__ = ("_anchor", "_began", "_device", "_ended", "_named", "_stands_for", "_streams", "_within")

    def __init__(
        self, found: streams.Streams, device: torch.device, stands_for: int, kind: str, graph: str, slot: int, seq: int
    ) -> None:
        self._streams = found
        self._device = device
        self._named = (kind, graph, slot, seq)
        self._anchor = anchor(found, device)
        self._stands_for = stands_for
        self._within = timing.within(self._anchor, stands_for)

    def __enter__(self) -> int:
        self._began = self._streams.record(self._streams.current(self._device), timed=True)
        self._within.__enter__()
        return self._stands_for

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._within.__exit__(kind, error, where)
        if error:
            return
        self._ended = self._streams.record(self._streams.current(self._device), timed=True, sleeps=True)
        with _lock:
            _unread.append(self)
            if len(_unread) > UNREAD:
                _read_fired(1)

    @property
    def graph(self) -> str:
        return self._named[1]

    def fired(self) -> bool:
        """Whether the device has executed the node."""
        with self._streams.on(self._device):
            return self._ended.query()

    def wait(self) -> None:
        """Returns when the device has executed the node."""
        with self._streams.on(self._device):
            self._ended.synchronize()

    def event(self) -> trace.Event:
        """The node with the device's times, once it has fired."""
        began = self._anchor.when(self._began)
        ended = self._anchor.when(self._ended)
        return trace.Event(*self._named, began, ended, 0, str(self._device), "")


UNTIMED = nullcontext(0)
"""For a device without streams, or a run that is not sampled."""


def node(kind: str, graph: str, slot: int, seq: int, device: torch.device | None) -> Node | nullcontext[int]:
    """The context of a "begin" or a "store", which counts its runs. `device`: its tensor's."""
    on = _on(graph, device)
    if on is None:
        return UNTIMED
    _devices.setdefault(graph, on[1])
    first = kind == "begin"  # the first one ran before the device was known
    run = _runs.get((graph, seq), first)
    _runs[graph, seq] = run + 1
    if run >= RUNS and run % RUNS:
        return UNTIMED
    return Node(*on, 1 if run < RUNS else RUNS, kind, graph, slot, seq)


def again(kind: str, graph: str, slot: int, seq: int, device: torch.device, stands_for: int) -> Node | nullcontext[int]:
    """The context of another node of a tensor, whose store stands for `stands_for` runs."""
    on = _on(graph, device)
    return Node(*on, stands_for, kind, graph, slot, seq) if on else UNTIMED


def _on(graph: str, device: torch.device | None) -> tuple[streams.Streams, torch.device] | None:
    """The device that times a node: its tensor's, or else the graph's; None without streams."""
    found = streams.of(device) if device else None
    if device is None or found is None:
        device = _devices.get(graph)
        found = streams.of(device) if device else None
    return (found, device) if found and device else None


def events() -> list[trace.Event]:
    """The nodes that were timed, in order within each graph; `nbytes` is 0, `where` the device. Waits for them."""
    with _lock:
        waiting = list(_unread)
    for timed in waiting:  # without the lock, so that other threads go on
        timed.wait()
    with _lock:
        _read_fired(len(waiting))
        return sorted(_read, key=attrgetter("started"))


def clear() -> list[Node]:
    """Forgets all times, counts runs from 0, and returns the unread nodes. Makes a fresh lock, for a fork's child."""
    global _lock
    _lock = threading.RLock()
    unread = list(_unread)
    _unread.clear()
    _read.clear()
    _devices.clear()
    _runs.clear()
    return unread


def forget(graph: str) -> None:
    """Forgets the times of one graph, and how often it ran."""
    with _lock:
        unread = [timed for timed in _unread if timed.graph != graph]
        read = [event for event in _read if event.graph != graph]
        _unread.clear()
        _unread.extend(unread)
        _read.clear()
        _read.extend(read)
        _devices.pop(graph, None)
        for run in [run for run in _runs if run[0] == graph]:
            del _runs[run]


def _read_fired(most: int) -> None:
    """Reads at most `most` of the oldest nodes, as far as they have fired. Called under the lock."""
    while most and _unread:
        oldest = _unread.popleft()  # first: a signal handler that comes here meanwhile takes the next one
        if not oldest.fired():
            _unread.appendleft(oldest)
            return
        _read.append(oldest.event())
        most -= 1
