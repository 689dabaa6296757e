"""Engines that move bytes as late as they may, so that whoever reads or writes too early is seen."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from tests.runtime.engines import DelayedEngine, Wrapped, registered


class Lazy:
    """A transfer that does nothing until it is waited for."""

    def __init__(self, transfer: Completion) -> None:
        self._transfer, self._waited, self._cancelled = transfer, False, False

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
        self._cancelled = not self._waited
        return self._cancelled or self._transfer.cancel()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

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


class LazyWrites(Wrapped):
    """Nothing is written before it is waited for or `write_all` is called; until then only the tensor has the bytes."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._begun: list[Lazy] = []

    def write(self, extent: Extent, memory: Memory) -> Completion:
        self._begun.append(Lazy(self.inner.write(extent, memory)))
        return self._begun[-1]

    def write_all(self) -> None:
        """Ends all writes that nobody cancelled."""
        begun, self._begun = self._begun, []
        for write in begun:
            if not write.cancelled:
                write.wait()


@contextmanager
def engines() -> Iterator[tuple[str, str, str]]:
    """Names: the engine in memory, the same with lazy reads, "posix" whose writes come out of order and late."""
    with ExitStack() as stack:
        lazy = stack.enter_context(registered(LazyReads, "memory"))
        slow = stack.enter_context(registered(lambda inner: DelayedEngine(inner, 0.0, 0.003), "posix"))
        yield "memory", lazy, slow
