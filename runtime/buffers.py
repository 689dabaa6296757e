"""Recycled page-aligned memory: what loads arrive in, and what small transfers bounce through.

The first touch of fresh memory costs 0.7 s per GiB, as much as the read itself, so regions are mapped once and reused.
A tensor on a region gives it back when its storage dies, whatever aliases of it exist by then.
"""

import contextlib
import ctypes
import itertools
import mmap

import torch

from ssd_fx.runtime.guard import Guard

PAGE = 4096
HUGE = 4 << 20  # from here on huge pages are asked for: the first touch of 64 MiB took 17 ms instead of 40


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of a page and of 1/8 of its leading power of two: at most 12.5% waste."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Region:
    """A private anonymous mapping of `nbytes` at `address`, unmapped when nobody refers to it. `uses` counts takes."""

    __slots__ = ("_map", "address", "nbytes", "since", "uses")

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE:
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing else
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.uses = self.since = 0


class BufferPool:
    """Regions by size class. At most `limit` bytes stay mapped without a user; the oldest are unmapped first."""

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit = limit
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.mappings = 0
        self.idle_bytes = 0
        self._idle: dict[int, dict[Region, None]] = {}  # by size, oldest first
        self._returns = itertools.count()
        self._guard: Guard[tuple[Region, int]] = Guard(self._recycle)

    def take(self, nbytes: int) -> Region:
        """A page-aligned region of at least `nbytes`, with any content."""
        size = size_class(nbytes)
        self._guard.drain()
        with self._guard.lock:
            idle = self._idle.get(size)
            if idle:
                region = idle.popitem()[0]
                self.idle_bytes -= size
            else:
                region = self._map(size)
            region.uses += 1
        return region

    def give(self, region: Region) -> None:
        """Takes a region back."""
        self._guard.later((region, region.uses))

    def tensor(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, nbytes: int, phase: int
    ) -> torch.Tensor:
        """A CPU tensor of that layout, spanning `nbytes`, whose data_ptr() is `phase` modulo a page; any content."""
        region = self.take(phase + nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(region.address + phase)
        memory.region = region  # type: ignore[attr-defined]  # mapped for as long as the storage lives
        self._guard.watch(memory, (region, region.uses))
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)

    def trim(self) -> None:
        """Unmaps every idle region."""
        self._guard.drain()
        with self._guard.lock:
            self._shrink(0)

    def after_fork(self) -> None:
        """In the child: a fresh lock, and no idle regions, for another thread may have been at work on them."""
        self._guard.reset()
        self._idle.clear()
        self.resident_bytes -= self.idle_bytes
        self.idle_bytes = 0

    def _map(self, size: int) -> Region:
        region = Region(size)
        self.mappings += 1
        self.resident_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        return region

    def _recycle(self, returned: tuple[Region, int]) -> None:
        region, use = returned
        idle = self._idle.setdefault(region.nbytes, {})
        if region.uses != use or region in idle:
            return  # called again after a signal came in between, see Guard
        region.since = next(self._returns)
        idle[region] = None
        self.idle_bytes += region.nbytes
        self._shrink(self.limit)

    def _shrink(self, limit: int) -> None:
        while self.idle_bytes > limit:
            oldest = min((next(iter(idle)) for idle in self._idle.values() if idle), key=lambda region: region.since)
            del self._idle[oldest.nbytes][oldest]
            self.idle_bytes -= oldest.nbytes
            self.resident_bytes -= oldest.nbytes


POOL = BufferPool()
