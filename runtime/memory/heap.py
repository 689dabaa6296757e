"""The C heap, where CPU tensors live: it keeps freed memory, and gets huge pages.

Fresh pages cost 0.7 s per GiB at their first touch, 17 times what it costs to fill them again. Offloading frees and
allocates every activation within a step. By default glibc gives the top of its heap back to the kernel once more than
twice its mmap threshold (at most 64 MiB) is free there. A step would pay for the same pages over and over.
Direct I/O pins every page that it transfers, and unpins it in the disk's interrupt. With huge pages it has 512 times
fewer to pin (docs/measurements.md).
"""

from __future__ import annotations

import ctypes
import functools
import os

KEEP_BYTES = 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20  # the most to which glibc adjusts it; setting the trim threshold stops the adjustment
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE = 2 << 20

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def keep_freed_memory() -> bool:
    """Whether glibc keeps up to `KEEP_BYTES` of freed memory from now on.

    Nothing is changed where the user tunes malloc (`MALLOC_*_`, `GLIBC_TUNABLES`), nor in another C library.
    Source: mallopt(3).
    """
    if not _ours():
        return False
    kept = _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1
    return bool(_libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES) == 1 and kept)


class HugePages:
    """Asks the kernel for huge pages for the heap, part by part as it grows."""

    def __init__(self) -> None:
        self._done_to: int | None = None  # None: nothing yet

    def follow(self) -> int:
        """The bytes of the heap that were new. Called once a step; costs one system call when the heap did not grow.

        Pages in use are collapsed into huge ones where the kernel can (6.1 and later). Source: madvise(2).
        """
        if not _ours():
            return 0
        end = int(_libc.sbrk(0))
        if self._done_to is None:
            self._done_to = _heap_start(end)
        start = -(-min(self._done_to, end) // _HUGE) * _HUGE
        stop = end // _HUGE * _HUGE
        self._done_to = max(start, stop)
        if stop <= start:
            return 0
        if _libc.madvise(start, stop - start, _MADV_HUGEPAGE) == 0:
            _libc.madvise(start, stop - start, _MADV_COLLAPSE)  # may fail: then only new pages are huge
        return stop - start


HUGE_PAGES = HugePages()


@functools.cache
def _ours() -> bool:
    """Whether this is glibc's malloc and nobody else tunes it."""
    tuned = any((n.startswith("MALLOC_") and n.endswith("_")) or n == "GLIBC_TUNABLES" for n in os.environ)
    return hasattr(_libc, "gnu_get_libc_version") and not tuned


def _heap_start(end: int) -> int:
    """The start of the heap that ends at `end`, or `end` if the kernel does not show the heap."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                return int(line.partition("-")[0], 16)
    return end
