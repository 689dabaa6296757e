"""The times of a device's events on the host's clock, time.perf_counter.

Only the time between two events can be asked for. It is a float32 in milliseconds, with a resolution of 2 us after
20 s, and the device's clock drifts. So an event is measured from an *anchor*: an event that was recorded shortly
before, and of which the host knows when it fired. The time of an event may be asked for at any later moment.

An event with a time costs the host some 2 us more than one without. So nodes and transfers are timed in samples: within
`timing.within`, which `device_trace` enters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter as now
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ssd_fx.runtime.device.streams import Event, Streams

FRESH_S = 10.0  # a drift of 20 ppm makes 0.2 ms in this time


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event of `device`, and when it fired, in seconds."""

    device: torch.device
    event: Event
    fired_s: float

    def when(self, event: Event) -> float:
        """When `event` fired, in seconds. It must have been recorded after the anchor was taken, and have fired."""
        return self.fired_s + self.event.elapsed_time(event) / 1e3


_anchors: dict[tuple[Streams, torch.device], Anchor] = {}
_making = threading.Lock()


def anchor(streams: Streams, device: torch.device) -> Anchor:
    """An anchor of `device`, at most `FRESH_S` old. Take it before recording the events that it is for."""
    found = _anchors.get((streams, device))
    if found is None or now() - found.fired_s > FRESH_S:
        with _making:
            event = streams.idle(device)
            with streams.on(device):
                event.synchronize()  # takes some 20 us, because no kernel is before it
            found = _anchors[streams, device] = Anchor(device, event, now())
    return found


class _Timing(threading.local):
    """What this thread times. `stands_for`: the number of runs that the present one stands for."""

    def __init__(self) -> None:
        self._anchor: Anchor | None = None
        self.stands_for = 1

    def anchor_of(self, device: torch.device) -> Anchor | None:
        """The anchor of the transfers of `device` that are made now; None if they are not timed."""
        found = self._anchor
        return found if found is not None and found.device == device else None

    @contextmanager
    def within(self, anchor: Anchor, stands_for: int = 1) -> Iterator[None]:
        """Times the transfers of the anchor's device that are made in this context."""
        before, self._anchor = self._anchor, anchor
        self.stands_for = stands_for
        try:
            yield
        finally:
            self._anchor = before


timing = _Timing()


def forget() -> list[Anchor]:
    """Forgets all anchors and returns them. Makes a fresh lock: in the child of a fork the old one may be held."""
    global _making
    _making = threading.Lock()
    forgotten = list(_anchors.values())
    _anchors.clear()
    return forgotten
