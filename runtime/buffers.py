"""Recycled page-aligned memory: what loads arrive in, and what small transfers bounce through.

The first touch of fresh memory costs 0.7 s per GiB, as much as the read itself, so regions are mapped once and reused.
A tensor on a region gives it back when its storage dies, whatever aliases of it exist by then.
"""

import ctypes
import functools
import mmap
import weakref
from collections import deque

import torch

from ssd_fx.runtime.guard import Guard

PAGE = 4096


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of a page and of 1/8 of its leading power of two: at most 12.5% waste."""
    step = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class Region:
    """A private anonymous mapping of `nbytes` at `address`."""

    __slots__ = ("_map", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def unmap(self) -> None:
        """Gives the memory back to the system; nothing may point into it any more."""
        self._map.close()


class BufferPool:
    """Regions by size class. At most `limit` bytes stay mapped without a user; the oldest are unmapped first."""

    def __init__(self, limit: int = 256 << 20) -> None:
        self.limit = limit
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.mappings = 0
        self._guard = Guard()
        self._free: dict[int, deque[Region]] = {}
        self._ages: deque[Region] = deque()  # the free regions, oldest first
        self._free_bytes = 0
        self._users: dict[int, weakref.ref[object]] = {}  # keeps the references alive that watch tensors' memory

    def take(self, nbytes: int) -> Region:
        """A page-aligned region of at least `nbytes`, with any content."""
        size = size_class(nbytes)
        with self._guard.lock:
            free = self._free.get(size)
            if free:
                region = free.pop()
                self._ages.remove(region)
                self._free_bytes -= size
            else:
                region = self._map(size)
        self._guard.drain()
        return region

    def give(self, region: Region) -> None:
        """Takes a region back; safe in a finalizer."""
        self._guard.later(functools.partial(self._recycle, region))

    def tensor(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, nbytes: int, phase: int
    ) -> torch.Tensor:
        """A CPU tensor of that layout, spanning `nbytes`, whose data_ptr() is `phase` modulo a page; any content."""
        region = self.take(phase + nbytes)
        address = region.address
        memory = (ctypes.c_ubyte * nbytes).from_address(address + phase)
        self._users[address] = weakref.ref(memory, lambda _: self._forsaken(address, region))
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)

    def trim(self) -> None:
        """Unmaps every free region."""
        with self._guard.lock:
            self._shrink(0)
        self._guard.drain()

    def after_fork(self) -> None:
        """In the child: a fresh lock and no free regions, for another thread may have been at work on them."""
        self._guard.reset()
        self.resident_bytes -= self._free_bytes
        self._free_bytes = 0
        self._free.clear()
        self._ages.clear()

    def _forsaken(self, address: int, region: Region) -> None:
        self._users.pop(address, None)
        self.give(region)

    def _map(self, size: int) -> Region:
        region = Region(size)
        self.mappings += 1
        self.resident_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        return region

    def _recycle(self, region: Region) -> None:
        self._free.setdefault(region.nbytes, deque()).append(region)
        self._ages.append(region)
        self._free_bytes += region.nbytes
        self._shrink(self.limit)

    def _shrink(self, limit: int) -> None:
        while self._free_bytes > limit:
            region = self._ages.popleft()
            self._free[region.nbytes].remove(region)
            self._free_bytes -= region.nbytes
            self.resident_bytes -= region.nbytes
            region.unmap()


POOL = BufferPool()
