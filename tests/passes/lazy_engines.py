"""Engines that move bytes as late as they may, so that whoever reads or writes too early is seen."""

from __future__ import annotations

import ctypes

from ssd_fx.runtime.engines.base import Completion, Extent, Memory
from tests.runtime.engines import DelayedEngine, Wrapped, around


class Lazy:
    """A transfer that does nothing until it is waited for."""

    def __init__(self, transfer: Completion) -> None:
        self._transfer, self._waited = transfer, False

    def start(self) -> None:
        pass

    def done(self) -> bool:
        return self._waited

    def wait(self) -> None:
        if not self._waited:
            self._waited = True
            self._transfer.start()
        self._transfer.wait()

    def cancel(self) -> bool:
        return not self._waited or self._transfer.cancel()

    def span(self) -> tuple[float, float]:
        return self._transfer.span()


class Unending(Lazy):
    """And tests that wait for all writes do not wait for this one."""


class LazyRead(Lazy):
    """And leaves garbage in the memory until then."""

    def __init__(self, read: Completion, memory: Memory) -> None:
        super().__init__(read)
        self._memory = memory

    def start(self) -> None:
        ctypes.memset(self._memory.ptr, 0xA5, self._memory.nbytes)


class LazyReads(Wrapped):
    """Nothing is read before somebody waits for it."""

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return LazyRead(self.inner.read(extent, memory), memory)


def engines() -> tuple[str, str, str]:
    """Names: the engine in memory, the same with lazy reads, "posix" whose writes come out of order and late."""
    return "memory", around(LazyReads, "memory"), around(lambda inner: DelayedEngine(inner, 0.0, 0.003))
