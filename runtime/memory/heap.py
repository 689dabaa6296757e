"""The C heap, where CPU tensors live: freed memory stays with the process, and lies in huge pages.

A page that the kernel hands out costs 0.7 s per GiB at its first touch, 17 times what it costs to fill it again.
Offloading frees and allocates every activation within a step; glibc gives the top of its heap back to the kernel as
soon as twice its mmap threshold (at most 64 MiB) is free there, and the step pays for the same pages over and over.
Direct I/O pins every page that it transfers, and releases it in the disk's interrupt: with huge pages that is one
page in 512 (docs/measurements.md).
"""

from __future__ import annotations

import ctypes
import functools
import os

KEEP_BYTES = 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20  # where glibc's own adjustment ends; setting the one threshold freezes the other
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_HUGE = 2 << 20

_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = [ctypes.c_ssize_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def keep_freed_memory() -> bool:
    """Let glibc keep up to `KEEP_BYTES` of free memory; returns whether it does.

    It is left alone where the user tunes malloc (`MALLOC_*_`, `GLIBC_TUNABLES`); another C library is not asked.
    Source: mallopt(3).
    """
    if not _ours():
        return False
    kept = _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1
    return bool(_libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES) == 1 and kept)


class HugePages:
    """Asks for huge pages under the heap, part by part as it grows."""

    def __init__(self) -> None:
        self._done_to: int | None = None  # None: nothing yet

    def follow(self) -> int:
        """To be called once a step. Bytes of the heap that were new; 0, at the price of one call, when it did not grow.

        Source: madvise(2); pages that are in use already are collapsed where the kernel can (6.1 and later).
        """
        if not _ours():
            return 0
        end = int(_libc.sbrk(0))
        if self._done_to is None:
            self._done_to = _heap_start(end)
        start, stop = -(-min(self._done_to, end) // _HUGE) * _HUGE, end // _HUGE * _HUGE
        self._done_to = max(start, stop)
        if stop <= start:
            return 0
        if _libc.madvise(start, stop - start, _MADV_HUGEPAGE) == 0:
            _libc.madvise(start, stop - start, _MADV_COLLAPSE)  # an older kernel refuses, and only new pages are huge
        return stop - start


HUGE_PAGES = HugePages()


@functools.cache
def _ours() -> bool:
    """Whether this is glibc's malloc and nobody else tunes it."""
    tuned = any((n.startswith("MALLOC_") and n.endswith("_")) or n == "GLIBC_TUNABLES" for n in os.environ)
    return hasattr(_libc, "gnu_get_libc_version") and not tuned


def _heap_start(end: int) -> int:
    """Where the heap that ends at `end` begins, or `end` if the kernel shows none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                return int(line.partition("-")[0], 16)
    return end
