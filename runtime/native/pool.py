"""The interface of the pools of I/O threads (`loader`, `fallback`), and the constants that they share with `pool.h`."""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol, TypeAlias

from ssd_fx.runtime.native.driver import Event

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


class Counts(NamedTuple):
    """What a pool has done so far."""

    summed_bytes: int = 0  # by checksums
    copied_bytes: int = 0  # from and to devices
    staging_bytes: int = 0  # pinned memory now
    allocations: int = 0  # of pinned memory
    streams: int = 0  # made


class Request(Protocol):
    """One transfer. It is *final* when nothing accesses its memory any more."""

    def start(self, event: Event | None = None) -> None:
        """Queues the request, which its owner has noted down before (see `engines.base.Completion`).

        `event`: the transfer of a device's memory waits for it. It is kept alive until the request is final.
        """

    def state(self) -> int:
        """PENDING, OK, FAILED or CANCELLED. Does not block."""

    def wait(self, timeout_ms: int) -> int:
        """The state, after at most `timeout_ms`."""

    def cancel(self) -> int:
        """The final state, OK if all bytes were transferred. Drops what has not started, and waits for what runs."""

    def error(self) -> tuple[int, int]:
        """(errno or one of the codes above, file offset) of a request that FAILED."""

    def cuda_error(self) -> tuple[str, int]:
        """(function, result) of a request that failed with CUDA_FAILED."""

    def span(self) -> tuple[float, float]:
        """Start of the first piece and end of the last, in seconds of time.perf_counter."""


class Pool(Protocol):
    """Executes requests. The caller keeps memory and descriptor alive until a request is final."""

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

        Raises: NotImplementedError for a device if the pool cannot stage its memory.
        """

    def counts(self) -> Counts:
        """What the pool has done so far."""

    def close(self) -> None:
        """Cancels what has not started, waits for what runs, ends the threads."""
