"""Times of work on a device, by the device's events where it runs behind the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from ssd_fx.runtime.device import streams

_REPEATS = 5
_ENOUGH_S = 0.1  # of one figure's repeats, and no more than _MOST_S unless a single one takes longer
_MOST_S = 0.2
_PATIENCE_S = 20.0  # of the host, which may have to launch a thousand runs of a short kernel


class NoClock(Exception):
    """The events of a device say that its kernels take no time."""


class Clock:
    """Times work on one device: by its events where it has streams, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one run on the device's current stream; this thread may be on another device."""
        queued = streams.of(self.device)
        if queued is None:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        with queued.on(self.device):
            begin = queued.record(queued.current(self.device), timed=True)
            work()
            end = queued.record(queued.current(self.device), timed=True)
            end.synchronize()
            return begin.elapsed_time(end) / 1e3

    def typical(self, work: Callable[[], object]) -> float:
        """Seconds of one run, as the median of several after a warm-up; of few if one takes long.

        Raises:
            NoClock: the runs take no time by the device's events, so their sum would never be enough.
        """
        started = time.perf_counter()
        self.once(work)
        runs = [self.once(work)]
        while sum(runs) < _ENOUGH_S or (len(runs) < _REPEATS and sum(runs) < _MOST_S):
            if time.perf_counter() - started > _PATIENCE_S:
                break
            runs.append(self.once(work))
        typical = statistics.median(runs)
        if not typical > 0.0:
            raise NoClock(
                f"{len(runs)} runs took {_PATIENCE_S} s on the host and no time by the events of {self.device}"
            )
        return typical
