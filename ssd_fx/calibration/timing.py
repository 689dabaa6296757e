"""Times of work on a device, by the device's events where it runs behind the host.

Where other processes use the cores of a CPU, such as data loaders, a run takes as long as they let it. What it takes of
the cores does not change much. So there the time of a run is its CPU time, shared out among all threads. Few threads
run it, since threads that wait for one that has no core use CPU time too. Beside 14 processes on 2 cores, products and
sums of tensors came to 0.87 of their rates on idle cores by CPU time, and to 0.03 by the clock.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ssd_fx.runtime.device import streams

log = logging.getLogger("ssd_fx")
_REPEATS = 5
_ENOUGH_S = 0.02  # seconds that the runs of one figure take at least; up to _MOST_S if there are fewer than _REPEATS
_MOST_S = 0.04
_PATIENCE_S = 4.0  # of the host, which may have to launch hundreds of runs of a short kernel
_BUSY_S = 0.2  # the same where others use the cores
_OTHERS = 0.15  # if other processes use this share of the cores or more, CPU time counts
_QUIET = 3  # seconds in a row that others must leave the cores idle
_LOOK_S = 0.3  # the least time to look at other processes: the kernel counts in 10 ms


class NoClock(Exception):
    """The events of a device say that its kernels take no time."""


class Others:
    """Other processes, and what they use of this process's cores from now on."""

    def __init__(self) -> None:
        self._before_s, self._started = self.cpu_s(), time.perf_counter()

    def share(self) -> float:
        """The share of the cores that they have used."""
        seconds = max(time.perf_counter() - self._started, _LOOK_S)
        return (self.cpu_s() - self._before_s) / (seconds * len(os.sched_getaffinity(0)))

    @staticmethod
    def cpu_s() -> float:
        """CPU seconds that they have had of these cores so far; 0 where the kernel has no /proc/stat."""
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:
            return 0.0
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        used = 0
        for ticks in (line.split()[1:] for line in lines if line.split()[0] in ours):
            user, nice, system, _, _, irq, softirq, *_ = map(int, ticks)
            used += user + nice + system + irq + softirq
        return used / os.sysconf("SC_CLK_TCK") - time.process_time()


def left_by(share: float) -> int | None:
    """How many cores other processes with such a share leave idle, at least one; None if they use few."""
    return None if share < _OTHERS else max(1, int((1 - share) * len(os.sched_getaffinity(0))))


def wait_until_idle() -> None:
    """Return when other processes have used little of the cores for some seconds in a row."""
    in_a_row = 0
    while in_a_row < _QUIET:
        others = Others()
        time.sleep(1.0)
        in_a_row = in_a_row + 1 if left_by(others.share()) is None else 0


class Clock:
    """Times work on one device: by its events where it has streams, else by the host's clock.

    `idle`: how many cores the other processes leave idle, at least one, where they use so many that CPU time counts.
    """

    def __init__(self, device: torch.device, idle: int | None = None) -> None:
        self.device, self.idle = device, idle
        self._threads = torch.get_num_threads()

    @classmethod
    def among_others(cls, device: torch.device) -> Clock:
        """A clock for now, after a look at what others use of the cores. They slow no device but the CPU."""
        if device.type != "cpu":
            return cls(device)
        others = Others()
        time.sleep(_LOOK_S)
        share = others.share()
        idle = left_by(share)
        if idle is not None:
            log.info("other processes use %.0f%% of the cores, so their rates are taken by CPU time", 100 * share)
        return cls(device, idle)

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
        patience_s = _PATIENCE_S if self.idle is None else _BUSY_S
        started = time.perf_counter()
        self.once(work)
        runs = [self.once(work)]
        while sum(runs) < _ENOUGH_S or (len(runs) < _REPEATS and sum(runs) < _MOST_S):
            if time.perf_counter() - started > patience_s:
                break
            runs.append(self.once(work))
        typical = statistics.median(runs)
        if not typical > 0.0:
            raise NoClock(
                f"{len(runs)} runs took {patience_s} s on the host and no time by the events of {self.device}"
            )
        return typical
