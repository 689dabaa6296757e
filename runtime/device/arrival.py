"""How long a device waited. The host also waits while the device catches up with it, and that costs no time."""

from __future__ import annotations

from time import perf_counter as now

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.clock import timing

LEAST_S = 2e-5  # a shorter wait is the price of the calls between two events


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
        """The seconds since that moment in which the device had nothing to do, but no more than the host has waited.

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


class Stall:
    """How long a stream waits between two of its own events. That is known once the device has passed both."""

    __slots__ = ("_began", "_device", "_ended", "_queued", "stands_for")

    def __init__(self, queued: streams.Streams, device: torch.device) -> None:
        self._queued = queued
        self._device = device
        self._ended: streams.Event | None = None
        self.stands_for = timing.stands_for  # the number of waits that this sample stands for
        with queued.on(device):
            self._began = queued.record(queued.current(device), timed=True)

    @staticmethod
    def sampled(device: torch.device) -> Stall | None:
        """A stall that begins now; None if this run is not timed."""
        queued = streams.of(device) if timing.anchor_of(device) else None
        return Stall(queued, device) if queued else None

    def end(self) -> None:
        """Marks the end of the wait, right after the stream was told what to wait for."""
        with self._queued.on(self._device):
            self._ended = self._queued.record(self._queued.current(self._device), timed=True)

    def seconds(self) -> float | None:
        """How long the stream waited, 0 for less than `LEAST_S`; None before the device has passed the end."""
        with self._queued.on(self._device):
            if self._ended is None or not self._ended.query():
                return None
            seconds: float = self._began.elapsed_time(self._ended) / 1e3
        return seconds if seconds > LEAST_S else 0.0
