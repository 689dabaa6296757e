"""A pool of I/O threads of the C library, its requests, and the constants that they share with `pool.h`."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ssd_fx.runtime.device.driver import FUNCTIONS

if TYPE_CHECKING:
    import torch

    from ssd_fx.runtime.native.loader import Library

PENDING, OK, FAILED, CANCELLED = range(4)
END_OF_FILE, CHECKSUM_MISMATCH, CUDA_FAILED = -1, -2, -3  # error codes besides those of errno
BLOCK = 1 << 20  # bytes that one checksum covers; the last block of a transfer may be shorter

Sums: TypeAlias = "array[int]"


def sums_for(nbytes: int) -> Sums:
    """Room for the checksums of `nbytes`."""
    return array("Q", bytes(8 * -(-nbytes // BLOCK)))


class OnDevice(NamedTuple):
    """The device that has a request's memory: the address of its `driver.Device`, and the bytes of the tensor there."""

    device: int
    nbytes: int


class Request:
    """One transfer. It is *final* when nothing accesses its memory any more."""

    __slots__ = ("_event", "_library", "_memory", "_sums", "_under_way", "address")

    def __init__(self, library: Library, under_way: dict[Request, object], sums: Sums | None) -> None:
        self._library = library
        self._under_way = under_way
        self._memory = library.request_type()
        self.address = ctypes.addressof(self._memory)
        self._event: torch.cuda.Event | None = None
        self._sums = sums  # kept alive while a thread may fill it

    def start(self, event: torch.cuda.Event | None = None, memory: object = None) -> None:
        """Queues the request, which its owner has noted down before (see `engines.base.Completion`).

        `event`: the transfer of a device's memory waits for it. `memory`: the owner of the bytes, if the caller may
        drop it. Both are kept alive until the request is final.
        """
        self._under_way[self] = memory
        self._event = event
        self._library.start(self.address, event.cuda_event if event else None)

    def state(self) -> int:
        """PENDING, OK, FAILED or CANCELLED. Does not block."""
        return self._seen(int(self._library.state(self.address)))

    def wait(self, timeout_ms: int) -> int:
        """The state, after at most `timeout_ms`."""
        return self._seen(int(self._library.wait(self.address, timeout_ms)))

    def cancel(self) -> int:
        """The final state, OK if all bytes were transferred. Drops what has not started, and waits for what runs."""
        return self._seen(int(self._library.cancel(self.address)))

    def error(self) -> tuple[int, int]:
        """(errno or one of the codes above, file offset) of a request that FAILED."""
        return int(self._library.error(self.address)), int(self._library.error_offset(self.address))

    def cuda_error(self) -> tuple[str, int]:
        """(function, result) of a request that failed with CUDA_FAILED."""
        return FUNCTIONS[self._library.cuda_function(self.address)], int(self._library.cuda_code(self.address))

    def span(self) -> tuple[float, float]:
        """Start of the first piece and end of the last, in seconds of time.perf_counter."""
        return float(self._library.started(self.address)), float(self._library.ended(self.address))

    def _seen(self, state: int) -> int:
        if state != PENDING:
            self._under_way.pop(self, None)
            self._event = None
        return state


class Pool:
    """Executes requests. The caller keeps memory and descriptor alive until a request is final.

    Raises: MemoryError if no thread can be started.
    """

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._pool = library.create(threads)
        self._closed = False
        self._under_way: dict[Request, object] = {}  # the C code has pointers to these, and to memory of the values
        if not self._pool:
            raise MemoryError(f"could not start {threads} I/O threads")

    def request(
        self,
        write: bool,
        fd: int,
        address: int,
        nbytes: int,
        offset: int,
        sums: Sums | None = None,
        on_device: OnDevice | None = None,
    ) -> Request:
        """A transfer of `nbytes` between `address` and `offset` of `fd`, which the caller starts.

        `sums`: one number per block of `BLOCK` bytes, which a write fills and a read compares.
        """
        made = Request(self._library, self._under_way, sums)
        sums_at = sums.buffer_info()[0] if sums else None
        device, content = on_device or (None, 0)
        placing = (int(write), fd, address, nbytes, offset, sums_at, device, content)
        self._library.init(made.address, self._pool, *placing)
        return made

    def summed_bytes(self) -> int:
        """The bytes that checksums were computed of."""
        return int(self._library.summed_bytes(self._pool))

    def close(self) -> None:
        """Cancels what has not started, waits for what runs, ends the threads. May be called again."""
        if not self._closed:
            self._closed = True
            self._library.destroy(self._pool)
        self._under_way.clear()
