"""The times of a device's events on the host's clock, that of time.perf_counter.

Events tell only how far two of them lie apart: as a float32 in milliseconds, 2 us of resolution after 20 s, and on the
device's own clock, which drifts. So an event is measured from an `Anchor` that was made shortly before it was recorded:
an event of which the host knows when it fired. It may be asked for at any time later.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter as now
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ssd_fx.runtime.device.streams import Event, Streams

FRESH_S = 10.0  # at 20 ppm of drift an anchor is 0.2 ms off by then


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event, and when it fired, in seconds."""

    event: Event
    fired_s: float

    def when(self, event: Event) -> float:
        """When the device came to `event`, which was recorded after the anchor was taken, and has fired."""
        return self.fired_s + self.event.elapsed_time(event) / 1e3


_anchors: dict[tuple[Streams, torch.device], Anchor] = {}
_making = threading.Lock()


def anchor(streams: Streams, device: torch.device) -> Anchor:
    """One of `device` that is at most `FRESH_S` old. To be taken before the events are recorded that it is for."""
    found = _anchors.get((streams, device))
    if found is None or now() - found.fired_s > FRESH_S:
        with _making:
            event = streams.idle(device)
            with streams.on(device):
                event.synchronize()  # not behind kernels, so some 20 us
            found = _anchors[streams, device] = Anchor(event, now())
    return found


def forget() -> None:
    """All anchors; in the child of a fork, where another thread may have held the lock."""
    global _making
    _making = threading.Lock()
    _anchors.clear()
