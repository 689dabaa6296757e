"""Engines that move bytes as late as they may, so that whoever reads or writes too early is seen."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ssd_fx.runtime.engines import Completion, Extent, Memory
from tests.runtime.engines import DelayedEngine, Wrapped, registered


class LazyRead:
    """A read that leaves garbage in the memory until it is waited for."""

    def __init__(self, read: Completion, memory: Memory) -> None:
        self._read, self._memory, self._waited = read, memory, False

    def start(self) -> None:
        ctypes.memset(self._memory.ptr, 0xA5, self._memory.nbytes)

    def done(self) -> bool:
        return self._waited

    def wait(self) -> None:
        if not self._waited:
            self._waited = True
            self._read.start()
        self._read.wait()

    def cancel(self) -> bool:
        return not self._waited or self._read.cancel()

    def span(self) -> tuple[float, float]:
        return self._read.span()

    @property
    def seconds(self) -> float:
        return self._read.seconds


class LazyReads(Wrapped):
    """Nothing is read before somebody waits for it."""

    def read(self, extent: Extent, memory: Memory) -> Completion:
        return LazyRead(self.inner.read(extent, memory), memory)


@contextmanager
def engines() -> Iterator[tuple[str, str, str]]:
    """Names: the engine in memory, the same with lazy reads, "posix" whose writes come out of order and late."""
    with ExitStack() as stack:
        lazy = stack.enter_context(registered(LazyReads, "memory"))
        slow = stack.enter_context(registered(lambda inner: DelayedEngine(inner, 0.0, 0.003), "posix"))
        yield "memory", lazy, slow
