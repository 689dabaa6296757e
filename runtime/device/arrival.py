"""How long a device waited. The host also waits while the device catches up with it, and that costs no time."""

from __future__ import annotations

from time import perf_counter as now

import torch

from ssd_fx.runtime.device import streams


class Arrival:
    """The moment at which a device has done all work that its stream has now. To be made before the host waits."""

    __slots__ = ("_device", "_event", "_queued", "_started")

    def __init__(self, device: torch.device) -> None:
        self._started = now()
        self._device = device
        self._queued = streams.of(device)
        if self._queued:
            with self._queued.on(device):
                self._event = self._queued.record(self._queued.current(device), timed=True)

    def waited_s(self) -> float:
        """The seconds since then in which the device had nothing to do, the host's wait at most.

        A device without streams works in the host's calls, so it waits when the host does.
        """
        waited = now() - self._started
        if not self._queued:
            return waited
        with self._queued.on(self._device):
            if not self._event.query():
                return 0.0
            here = self._queued.record(self._queued.current(self._device), timed=True)
            here.synchronize()  # at once, because the device had nothing to do
            return min(waited, self._event.elapsed_time(here) / 1e3)
