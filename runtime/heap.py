"""Freed memory stays with the process, so that the next tensor finds warm pages.

A page that the kernel hands out costs 0.7 s per GiB at its first touch, 17 times what it costs to fill it again.
Offloading frees and allocates every activation within a step; glibc gives the top of its heap back to the kernel as
soon as twice its mmap threshold (at most 64 MiB) is free there, and the step pays for the same pages over and over.
"""

from __future__ import annotations

import ctypes
import os

KEEP_BYTES = 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20  # where glibc's own adjustment ends; setting the one threshold freezes the other


def keep_freed_memory() -> bool:
    """Let glibc keep up to `KEEP_BYTES` of free memory; returns whether it does.

    It is left alone where the user tunes malloc (`MALLOC_*_`, `GLIBC_TUNABLES`); another C library is not asked.
    Source: mallopt(3).
    """
    tuned = [n for n in os.environ if (n.startswith("MALLOC_") and n.endswith("_")) or n == "GLIBC_TUNABLES"]
    libc = ctypes.CDLL(None)
    if tuned or not hasattr(libc, "gnu_get_libc_version"):
        return False
    kept = libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES) == 1 and kept)
