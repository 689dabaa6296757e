"""Engines that misbehave on purpose, each around a well-behaved one.

    config = config_json(tmp_path, around(DelayedEngine))                    # an engine by its name, as in options
    config = config_json(tmp_path, around(lambda inner: FailingEngine(inner, fails), "memory"))

DelayedEngine   writes begin late, in any order       FailingEngine   transfers fail, those that the test says
WritesOnDemand  writes begin when the test says so    HeldEngine      transfers take as long as a clock says

benchmarks/slow_drive.py and benchmarks/held.py use some of them too.
"""

import errno
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable

from ssd_fx.runtime.engines.base import Completion, Copy, Engine, Extent, Memory
from ssd_fx.runtime.engines.registry import ENGINES

_numbers = itertools.count()
_names: list[str] = []


def around(wrap: Callable[[Engine], Engine], inner: str = "posix") -> str:
    """Names an engine around `inner` until the test has ended. The name is its own, and so is its store."""
    _names.append(f"test-{next(_numbers)}")
    ENGINES[_names[-1]] = lambda config: wrap(ENGINES[inner](config))
    return _names[-1]


def forget() -> None:
    """What a test has left: names, and writes, which would begin in a later test, on memory that is gone by then."""
    while _names:
        del ENGINES[_names.pop()]
    for write in list(_late):
        if write._inner is None:
            write.cancel()


class Wrapped:
    """Passes everything on to `inner`."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.devices = inner, inner.devices
        self.name = f"{type(self).__name__}({inner.name})"
        self.refused: list[int | None] = []  # errno; an exception would keep its frames alive

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return self.inner.alloc(nbytes, tier)

    def free(self, extent: Extent) -> None:
        self.inner.free(extent)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        return self.inner.write(extent, memory)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return self.inner.read(extent, memory)

    def failed(self, extent: Extent, error: OSError) -> None:
        self.refused.append(error.errno)

    def close(self) -> None:
        self.inner.close()


class LateWrite:
    """A write that touches the memory only after a while: a buffer that is reused too early gives wrong bytes."""

    def __init__(self, make: Callable[[], Completion], delay_s: float) -> None:
        self._make, self._lock, self._began = make, threading.Lock(), threading.Event()
        self._inner: Completion | None = None
        self._cancelled = False
        self._created = time.perf_counter()
        self._delay_s = delay_s

    def start(self) -> None:
        _late.add(self)
        threading.Thread(target=self._begin_late, daemon=True).start()  # a Timer would keep us, and with us the memory

    def _begin_late(self) -> None:
        if not self._began.wait(self._delay_s):
            self.begin()

    def begin(self) -> None:
        with self._lock:
            if not self._cancelled and self._inner is None:
                inner = self._make()
                inner.start()
                self._inner = inner
        self._began.set()

    def done(self) -> bool:
        return self._cancelled or (self._inner is not None and self._inner.done())

    def wait(self) -> None:
        while not self._began.wait(0.1):
            continue
        if self._inner is None:
            raise OSError(errno.ECANCELED, "cancelled")
        self._inner.wait()

    def cancel(self) -> bool:
        with self._lock:
            self._cancelled = self._inner is None
        self._began.set()
        return True if self._inner is None else self._inner.cancel()

    def span(self) -> tuple[float, float]:
        return self._inner.span() if self._inner else (self._created, time.perf_counter())


_late: "weakref.WeakSet[LateWrite]" = weakref.WeakSet()


class DelayedEngine(Wrapped):
    """Every write starts a random `shortest_s` to `longest_s` late, so writes complete out of order."""

    def __init__(self, inner: Engine, shortest_s: float = 0.05, longest_s: float = 0.1, seed: int = 0) -> None:
        super().__init__(inner)
        self._range, self._random = (shortest_s, longest_s), random.Random(seed)
        self._late = weakref.WeakSet[LateWrite]()  # a list would keep the memory of the last one

    def write(self, extent: Extent, memory: Memory) -> Completion:
        write = LateWrite(lambda: self.inner.write(extent, memory), self._random.uniform(*self._range))
        self._late.add(write)
        return write

    def close(self) -> None:
        for write in list(self._late):
            write.cancel()
        self.inner.close()


class WritesOnDemand(Wrapped):
    """Writes touch the memory when `go` is called."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.waiting: list[LateWrite] = []

    def write(self, extent: Extent, memory: Memory) -> Completion:
        self.waiting.append(LateWrite(lambda: self.inner.write(extent, memory), delay_s=3600))
        return self.waiting[-1]

    def go(self) -> None:
        """All writes that wait are made, and have ended when this returns."""
        for write in self.waiting:
            write.begin()
            write.wait()
        self.waiting.clear()

    def close(self) -> None:
        for write in self.waiting:
            write.cancel()
        self.inner.close()


class Clock:
    """Real seconds. A test may have another clock, which goes on only where somebody waits."""

    def __call__(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Lane:
    """One transfer after the other, at `s_per_byte` of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.s_per_byte, self._free_at = clock, 0.0, 0.0

    def ends(self, nbytes: int) -> float:
        """When a transfer ends that is queued now."""
        self._free_at = max(self._free_at, self.clock()) + nbytes * self.s_per_byte
        return self._free_at


class HeldTransfer:
    """A transfer that ends no sooner than its lane says."""

    def __init__(self, inner: Completion, lane: Lane, nbytes: int) -> None:
        self._inner, self._lane, self._nbytes, self._ends = inner, lane, nbytes, 0.0

    def start(self) -> None:
        self._ends = self._lane.ends(self._nbytes)
        self._inner.start()

    def done(self) -> bool:
        return self._lane.clock() >= self._ends and self._inner.done()

    def wait(self) -> None:
        self._lane.clock.sleep(max(0.0, self._ends - self._lane.clock()))
        self._inner.wait()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def span(self) -> tuple[float, float]:
        return self._inner.span()


class HeldEngine(Wrapped):
    """A drive no faster than its lanes: `writes` and `reads`, which may be one."""

    def __init__(self, inner: Engine, writes: Lane, reads: Lane) -> None:
        super().__init__(inner)
        self.writes, self.reads = writes, reads

    def write(self, extent: Extent, memory: Memory) -> Completion:
        return HeldTransfer(super().write(extent, memory), self.writes, memory.nbytes)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return HeldTransfer(super().read(extent, memory), self.reads, memory.nbytes)


class Failure(Copy):
    """A transfer that failed."""

    def __init__(self, code: int) -> None:
        super().__init__(0, 0, 0)
        self._code = code

    def wait(self) -> None:
        raise OSError(self._code, "a planted failure", "/planted")

    def cancel(self) -> bool:
        return True


class FailingEngine(Wrapped):
    """Fails what `fails(operation, count)` says, where operation is "alloc", "write", "submit" or "read".

    A failing "write" fails when it is waited for, a failing "submit" at once; `count` counts each operation from 0.
    """

    def __init__(self, inner: Engine, fails: Callable[[str, int], bool], code: int = errno.EIO) -> None:
        super().__init__(inner)
        self._fails, self._code = fails, code
        self.counts = {"alloc": 0, "write": 0, "submit": 0, "read": 0}

    def _planted(self, operation: str) -> bool:
        self.counts[operation] += 1
        return self._fails(operation, self.counts[operation] - 1)

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        if self._planted("alloc"):
            raise OSError(self._code, "a planted failure", "/planted")
        return super().alloc(nbytes, tier)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        if self._planted("submit"):
            raise OSError(self._code, "a planted failure", "/planted")
        return Failure(self._code) if self._planted("write") else super().write(extent, memory)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return Failure(self._code) if self._planted("read") else super().read(extent, memory)
