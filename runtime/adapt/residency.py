"""How many bytes may be resident: what the budget allows, and more while the graph waits for the drive.

`Peak` forecasts the most bytes at a time that a step has stored and the backward has not asked for.

A plan is made for predicted rates. A drive that is slower, or busy with others' work, makes the graph wait. Then more
tensors stay in memory: as many bytes as the drive could not move in time. While the graph does not wait, fewer bytes
are tried now and then. Nothing is compiled again. Source: the adaptive offloading of SSDTrain (arXiv 2408.10013).

Bytes above the budget take at most half of the memory that would be free without them. Free memory is read when the
backward begins, where a step needs most. If other processes take the memory, the next step keeps fewer bytes.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable

from ssd_fx.runtime.adapt.habits import STALL_S
from ssd_fx.runtime.states import Entry

_log = logging.getLogger("ssd_fx")

# A step counts as waiting if it waits for more than this share of its time, unless the user allows more. Two such steps
# in a row are no accident.
WAITS = 0.02
WARM = 2  # steps that are not judged: code is compiled and files grow
# After so many steps without waits fewer bytes are tried. A failed trial doubles the number, up to LONGEST.
QUIET_STEPS, LONGEST = 4, 32
FIRST = 8  # the first trial gives up 1/FIRST of what is above `least`, each further one twice as much
MIB = 1 << 20


class Residency:
    """How many bytes may be resident: at least `least`, which the budget allows, and at most `most`.

    `most` is above `least` only under `budget="auto"`; otherwise nothing is adapted. `available_bytes` returns the
    memory that this process may take now. `waits`: the share of its time that a step may wait.

    All methods run under the lock of `entries`.
    """

    def __init__(
        self,
        least: int,
        most: int,
        available_bytes: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
        waits: float = WAITS,
    ) -> None:
        self.least = least
        self.nbytes = least
        self._most = max(least, most)
        self._available_bytes = available_bytes
        self._clock = clock
        self._waits = max(waits, WAITS)
        self._steps = 0
        self._step = 0  # the number of the step that runs
        self._began = 0.0
        self._loads = False
        self._stored = 0
        self._resident = 0  # the most resident bytes in this step
        self._free = sys.maxsize  # bytes that were free when the last backward began, plus ours above the budget
        self._waited_s = 0.0
        self._share = 0.0  # the share of its time that the step before waited
        self._quiet = 0  # steps in a row that did not wait
        self._patience = QUIET_STEPS
        self._part = FIRST
        self._enough = least  # bytes with which no step waited; in a trial more than `nbytes`

    @property
    def _on_trial(self) -> bool:
        """Whether fewer bytes are tried than were enough."""
        return self.nbytes < self._enough

    @property
    def more(self) -> int:
        """The bytes above what the budget allows."""
        return self.nbytes - self.least

    def allow(self, nbytes: int) -> None:
        """Sets how many bytes may be resident from here on, however long the graph waits."""
        self.least = self.nbytes = nbytes

    def stored(self, nbytes: int, resident_bytes: int) -> None:
        """Counts a tensor that was stored. `resident_bytes`: what is resident now, of all tensors."""
        self._stored += nbytes
        if resident_bytes > self._resident:
            self._resident = resident_bytes

    def spare(self, resident_bytes: int) -> int:
        """The bytes that may be read ahead: those that were resident above the budget in this step, and have left."""
        return max(0, min(self.more, self._resident) - resident_bytes)

    def waited(self, seconds: float) -> None:
        """Counts time in which the graph waited for a transfer."""
        if seconds > STALL_S:
            self._waited_s += seconds

    def loads(self, resident_bytes: int) -> None:
        """Records a load of a backward. At the first load of a step it reads how much memory is free.

        `resident_bytes`: what is resident now.
        """
        if not self._loads and self._most > self.least:
            self._free = self._available_bytes() + min(self.more, resident_bytes)
        self._loads = True

    def begins(self, step: int) -> None:
        """Records that a forward begins. If it is the first of a step, the step before is judged.

        `step`: the number of the step by the step clock; 0 for a forward of no step.
        """
        if step in (0, self._step):
            return
        self._step = step
        now = self._clock()
        if self._steps > WARM and self._most > self.least:
            self._judge(self._waited_s / max(now - self._began, 1e-9))
        self._steps += 1
        self._began = now
        self._loads = False
        self._stored = 0
        self._resident = 0
        self._waited_s = 0.0

    def _judge(self, share: float) -> None:
        """Changes how many bytes may be resident, after a step that waited for `share` of its time."""
        self._share, before = share, self._share
        limit = min(self._most, self.least + self._free // 2)
        if self.nbytes > limit:
            self._enough = limit
            self._change(limit, "memory is short")
            return
        if share <= self._waits:
            self._quiet += 1
            if self.more and self._quiet >= (QUIET_STEPS if self._on_trial else self._patience):
                self._try_less()
            return
        self._quiet = 0
        if before > self._waits:
            self._take_more(min(share, before), limit)

    def _take_more(self, share: float, limit: int) -> None:
        """Lets more bytes be resident, because each of the last two steps waited for at least `share` of its time."""
        if self._on_trial:  # the trial failed
            wanted = self._enough
            self._patience = min(2 * self._patience, LONGEST)
        else:
            late = math.ceil(min(share, 1.0) * self._stored)
            wanted = max(self.nbytes, min(self.nbytes + late, self.least + self._stored))
        self._part = FIRST
        self._enough = min(wanted, limit)
        self._change(self._enough, f"the last two steps waited {share:.0%} of their time")

    def _try_less(self) -> None:
        if self._on_trial:  # the trial did well
            self._patience = QUIET_STEPS
            self._part = max(1, self._part // 2)
        self._quiet = 0
        self._enough = self.nbytes
        self._change(self.nbytes - max(self.more // self._part, min(self.more, MIB)), "no step waited")

    def _change(self, nbytes: int, why: str) -> None:
        if nbytes != self.nbytes:
            self.nbytes = nbytes
            _log.info("%s: %.1f MiB more than planned may now stay in memory", why, self.more / MIB)


class Peak:
    """Forecasts the peak of the bytes that a step has stored and the backward has not asked for, released or not: it is
    the peak of the step before.

    Here a step ends when these bytes have fallen to half of their peak or less and rise again: several micro-batches
    may have one peak. The bytes need not fall to 0, because a caller may keep a graph for ever.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.nbytes = 0
        # A dict, not a set: `set.add` is a call, and a Ctrl-C may come at its end, before `nbytes` is changed.
        self._entries: dict[Entry, None] = {}
        self._highest_bytes = 0  # the peak of this step so far
        self._falling = False

    def add(self, entry: Entry) -> int:
        """Counts an entry from its store on. Returns the bytes that are expected to be stored until the peak, this
        entry included."""
        before = self.nbytes
        if self._falling and 2 * before <= self._highest_bytes:  # a new step
            self.peak_bytes = self._highest_bytes
            self._highest_bytes = before
        self._falling = False
        self._entries[entry] = None
        self.nbytes += entry.nbytes
        if self.nbytes > self._highest_bytes:
            self._highest_bytes = self.nbytes
        return self.peak_bytes - before

    def remove(self, entry: Entry) -> None:
        """Counts an entry no longer. Ignores an entry that was never added, or was removed before."""
        if entry in self._entries:
            del self._entries[entry]
            self.nbytes -= entry.nbytes
            self._falling = True
