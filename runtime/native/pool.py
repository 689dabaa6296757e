"""A pool of I/O threads of the C library, and the constants that it shares with `pool.h`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from array import array

    from ssd_fx.runtime.native.loader import Library

PENDING, OK, FAILED, CANCELLED = range(4)
END_OF_FILE, CHECKSUM_MISMATCH, CUDA_FAILED = -1, -2, -3  # error codes besides those of errno
BLOCK = 1 << 20  # bytes that one checksum covers; the last block of a part may be shorter

Words: TypeAlias = "array[int]"
WORDS = 7  # numbers in a Place


def blocks(nbytes: int) -> int:
    """How many checksums a part of `nbytes` has."""
    return -(-nbytes // BLOCK)


class Failure(ctypes.Structure):
    """struct Failure of pool.h. `error`: 0, an errno or one of the codes above. `where`: an offset in the file."""

    _fields_ = (
        ("error", ctypes.c_int),
        ("where", ctypes.c_int64),
        ("function", ctypes.c_int),
        ("code", ctypes.c_int),
        ("when", ctypes.c_double),
    )


class Pool:
    """Executes requests, with so many `threads` for each of its drives.

    The caller keeps memory and descriptors alive until a request is final.
    `transfers`: those whose requests are not final. The C code has pointers to memory that they own.

    Raises: MemoryError if a drive has no thread.
    """

    def __init__(self, library: Library, drives: int, threads: int) -> None:
        self.library = library
        self._pool = library.create(drives, threads)
        self._drives = drives
        self._closed = False
        self.transfers: dict[object, None] = {}
        if not self._pool:
            raise MemoryError(f"could not start {drives * threads} I/O threads")

    def request(self, write: bool, places: Words, device: int = 0) -> ctypes.Array[ctypes.c_char]:
        """The memory of a request, to be started by its address.

        `places`: for each part the numbers of struct Place of pool.h.
        `device`: the address of the `driver.Device` that has the memory; 0 for the host.
        """
        at, numbers = places.buffer_info()
        parts = numbers // WORDS
        made: ctypes.Array[ctypes.c_char] = (ctypes.c_char * self.library.request_size(parts))()
        self.library.init(made, self._pool, write, parts, at, device or None)
        return made

    def summed_bytes(self) -> int:
        """The number of bytes whose checksums were computed."""
        return int(self.library.summed_bytes(self._pool))

    def under_way(self) -> list[int]:
        """The bytes that each drive was given and has not moved yet."""
        return [self.library.under_way(self._pool, drive) for drive in range(self._drives)]

    def close(self) -> None:
        """Cancels what has not started, waits for what runs, ends the threads. May be called again."""
        if not self._closed:
            self._closed = True
            self.library.destroy(self._pool)
        self.transfers.clear()
