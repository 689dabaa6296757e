"""How long a device waited. The host also waits while the device catches up with it, and that costs no time."""

from __future__ import annotations

from time import perf_counter as now

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.clock import anchor


class Arrival:
    """The moment at which a device has done all work that its stream has now. To be made before the host waits."""

    __slots__ = ("_anchor", "_device", "_event", "_queued", "_started")

    def __init__(self, device: torch.device) -> None:
        self._started = now()
        self._device = device
        self._queued = streams.of(device)
        if self._queued:
            with self._queued.on(device):
                self._anchor = anchor(self._queued, device)
                self._event = self._queued.record(self._queued.current(device))

    def waited_s(self) -> float:
        """The seconds since then in which the device had nothing to do, the host's wait at most.

        A device without streams works in the host's calls, so it waits when the host does.
        """
        ended = now()
        if not self._queued:
            return ended - self._started
        with self._queued.on(self._device):
            if not self._event.query():
                return 0.0
            arrived = self._anchor.when(self._event)
        return max(0.0, ended - max(arrived, self._started))
