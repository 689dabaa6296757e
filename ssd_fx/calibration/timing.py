"""Times of work on a device, by the device's events where it runs behind the host.

Where other processes use the cores of a CPU, such as data loaders, a run takes as long as they let it. What it takes of
the cores does not change much. So there the time of a run is its CPU time, shared out among all threads. Few threads
run it, since threads that wait for one that has no core use CPU time too. Beside 14 processes on 2 cores, products and
sums of tensors came to 0.87 of their rates on idle cores by CPU time, and to 0.03 by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ssd_fx.runtime.device import streams

_REPEATS = 5
_ENOUGH_S = 0.1  # of one figure's repeats, and no more than _MOST_S unless a single one takes longer
_MOST_S = 0.2
_PATIENCE_S = 20.0  # of the host, which may have to launch a thousand runs of a short kernel
_BUSY_S = 1.0  # the same where others use the cores


class NoClock(Exception):
    """The events of a device say that its kernels take no time."""


class Clock:
    """Times work on one device: by its events where it has streams, else by the host's clock.

    `idle`: how many cores the other processes leave idle, at least one, where they use so many that CPU time counts.
    """

    def __init__(self, device: torch.device, idle: int | None = None) -> None:
        self.device, self.idle = device, idle
        self._threads = torch.get_num_threads()

    @contextmanager
    def on_idle_cores(self) -> Iterator[None]:
        """Within, no more threads compute than cores are idle."""
        if self.idle is not None:
            torch.set_num_threads(min(self.idle, self._threads))
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one run on the device's current stream; this thread may be on another device."""
        queued = streams.of(self.device)
        if queued is None and self.idle is not None:
            cpu_s = time.process_time()
            work()
            return (time.process_time() - cpu_s) / self._threads
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
            if time.perf_counter() - started > (_PATIENCE_S if self.idle is None else _BUSY_S):
                break
            runs.append(self.once(work))
        typical = statistics.median(runs)
        if not typical > 0.0:
            raise NoClock(
                f"{len(runs)} runs took {_PATIENCE_S} s on the host and no time by the events of {self.device}"
            )
        return typical
