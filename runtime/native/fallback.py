"""Python threads behind the interface of the native pool: correct, and slow while another thread holds the GIL."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import zlib
from dataclasses import dataclass, field

from ssd_fx.runtime.native.driver import Event
from ssd_fx.runtime.native.pool import (
    BLOCK,
    CANCELLED,
    CHECKSUM_MISMATCH,
    END_OF_FILE,
    FAILED,
    OK,
    PENDING,
    Counts,
    OnDevice,
    Sums,
)


@dataclass(eq=False, slots=True)
class ThreadRequest:
    """A transfer that is not cut into pieces. `pool.Request` has the contract of its methods."""

    pool: ThreadPool
    write: bool
    fd: int
    address: int
    nbytes: int
    offset: int
    sums: Sums | None = None
    _state: int = PENDING
    _started: bool = False
    _error: tuple[int, int] = (0, 0)
    _span: tuple[float, float] = (0.0, 0.0)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _final: threading.Event = field(default_factory=threading.Event)

    def start(self, event: Event | None = None) -> None:
        assert event is None, "this pool transfers no memory of a device"
        self.pool.enqueue(self)

    def state(self) -> int:
        return self._state

    def wait(self, timeout_ms: int) -> int:
        self._final.wait(timeout_ms / 1000)
        return self._state

    def cancel(self) -> int:
        with self._lock:
            running = self._started
            self._started = True
        if not running:
            self._finish(CANCELLED)
        self._final.wait()
        return self._state

    def error(self) -> tuple[int, int]:
        return self._error

    def cuda_error(self) -> tuple[str, int]:
        raise AssertionError("this pool transfers no memory of a device")

    def span(self) -> tuple[float, float]:
        return self._span

    def run(self) -> None:
        """Executes the transfer unless it was cancelled. Called by a thread of the pool."""
        with self._lock:
            if self._started:
                return
            self._started = True
        start = time.perf_counter()
        code, where = self._transfer()
        self._span = (start, time.perf_counter())
        self._error = (code, where)
        self._finish(FAILED if code else OK)

    def _finish(self, state: int) -> None:
        self._state = state
        self._final.set()

    def _transfer(self) -> tuple[int, int]:
        memory = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")
        if self.sums and self.write:
            for block, computed in enumerate(self._computed(memory)):
                self.sums[block] = computed
        failure = self._move(memory)
        if self.sums and not self.write and not failure[0]:
            return self._compared(memory, self.sums)
        return failure

    def _computed(self, memory: memoryview) -> list[int]:
        """The CRC-32 of each block. Another sum than the native pool's will do, because sums stay in the process."""
        with self.pool.lock:
            self.pool.summed += self.nbytes
        return [zlib.crc32(memory[at : at + BLOCK]) for at in range(0, self.nbytes, BLOCK)]

    def _compared(self, memory: memoryview, sums: Sums) -> tuple[int, int]:
        for block, found in enumerate(self._computed(memory)):
            if found != sums[block]:
                return CHECKSUM_MISMATCH, self.offset + block * BLOCK
        return 0, 0

    def _move(self, memory: memoryview) -> tuple[int, int]:
        done = 0
        while done < self.nbytes:
            at = self.offset + done
            try:
                moved = (os.pwritev if self.write else os.preadv)(self.fd, [memory[done:]], at)
            except OSError as error:
                return error.errno or 5, at
            if not moved:
                return (5 if self.write else END_OF_FILE), at
            done += moved
        return 0, 0


class ThreadPool:
    """`pool.Pool` with Python threads. Reads go before writes."""

    def __init__(self, threads: int) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, ThreadRequest | None]] = queue.PriorityQueue()
        self._count = 0
        self._closed = False
        self.lock = threading.Lock()
        self.summed = 0
        self._pending: dict[ThreadRequest, None] = {}  # oldest first
        self._threads = [threading.Thread(target=self._work, daemon=True, name="ssd_fx-io") for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def request(
        self,
        write: bool,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        sums: Sums | None = None,
        on_device: OnDevice | None = None,
    ) -> ThreadRequest:
        if on_device:
            raise NotImplementedError(
                "tensors on a CUDA device need the native I/O pool; install a C compiler as 'cc', or reinstall ssd_fx"
            )
        return ThreadRequest(self, write, fd, address, nbytes, offset, sums)

    def counts(self) -> Counts:
        return Counts(summed_bytes=self.summed)

    def enqueue(self, request: ThreadRequest) -> None:
        """Queues a request for the threads, or cancels it if the pool is closed."""
        with self.lock:
            if not self._closed:
                self._count += 1
                self._pending[request] = None
                self._queue.put((int(request.write), self._count, request))
                return
        request.cancel()

    def close(self) -> None:
        with self.lock:
            self._closed = True
            pending = list(self._pending)
        for request in reversed(pending):
            request.cancel()
        for _ in self._threads:
            self._queue.put((2, 0, None))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (request := self._queue.get()[2]) is not None:
            request.run()
            with self.lock:
                self._pending.pop(request, None)
