"""The interface of the pools of I/O threads (`native`, `fallback`), and the numbers they share with `native/pool.h`."""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol, TypeAlias

from ssd_fx.runtime.native.driver import Event

PENDING, OK, FAILED, CANCELLED = range(4)
END_OF_FILE, CHECKSUM_MISMATCH, CUDA_FAILED = -1, -2, -3  # error codes beside errno
BLOCK = 1 << 20  # bytes that one checksum covers; the last block of a transfer may be shorter

Sums: TypeAlias = "array[int]"


def sums_for(nbytes: int) -> Sums:
    """Room for the checksums of `nbytes`."""
    return array("Q", bytes(8 * -(-nbytes // BLOCK)))


class OnDevice(NamedTuple):
    """A request's memory is on a device: the address of its `driver.Device`, and the bytes of the tensor there."""

    device: int
    nbytes: int


class Counts(NamedTuple):
    """Of a pool: bytes summed and bytes copied from or to devices so far, pinned bytes now, times some were allocated,
    streams made."""

    summed_bytes: int = 0
    copied_bytes: int = 0
    staging_bytes: int = 0
    allocations: int = 0
    streams: int = 0


class Request(Protocol):
    """One transfer. Final means that nothing accesses its memory any more."""

    def start(self, event: Event | None = None) -> None:
        """Queues it. Apart from its making, so that its owner can note it down first. `event`: what the device's
        memory has to wait for; kept until the request is final."""

    def state(self) -> int:
        """PENDING, OK, FAILED or CANCELLED; does not block."""

    def wait(self, timeout_ms: int) -> int:
        """The state, after at most `timeout_ms`."""

    def cancel(self) -> int:
        """Drops what has not started, waits for what runs; the final state, OK if all had been transferred."""

    def error(self) -> tuple[int, int]:
        """(errno or one of the codes above, file offset) of a request that FAILED."""

    def cuda_error(self) -> tuple[str, int]:
        """(function, its result) of a request that failed with CUDA_FAILED."""

    def span(self) -> tuple[float, float]:
        """Start of its first piece and end of its last, on the clock of time.perf_counter."""


class Pool(Protocol):
    """Executes requests; the caller keeps memory and descriptor alive until a request is final."""

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
        """A transfer of `nbytes` between `address` and `offset` of `fd`, which is yet to be started.

        `sums`: one number per block of `BLOCK` bytes, which a write fills and a read compares.

        Raises: NotImplementedError for a device if the pool cannot stage its memory.
        """

    def counts(self) -> Counts:
        """What the pool did so far."""

    def close(self) -> None:
        """Cancels what has not started, waits for what runs, ends the threads."""
