"""Recycled page-aligned memory, for loads to arrive in and for small transfers to bounce through.

The first touch of fresh memory takes as long as the read itself (64 MiB: 21 ms in huge pages, 52 ms in small ones,
10 ms to fill it again), so touched memory is used again. It is cut from one range of addresses (`arena`), so memory of
one size serves any other. A tensor gives its memory back when its storage dies.
"""

import weakref
from collections.abc import Callable

import torch

from ssd_fx.runtime.guard import Guard
from ssd_fx.runtime.memory.arena import PAGE, Arena, map_range, round_up

__all__ = ["PAGE", "POOL", "BufferPool", "Region"]


class Region:
    """`nbytes` at `address`, which are its user's until they are given back."""

    __slots__ = ("address", "arena", "nbytes", "taken")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self.arena = arena  # keeps the range mapped
        self.nbytes = nbytes
        self.address = arena.address + offset
        self.taken = True


class BufferPool:
    """Regions of recycled memory. At most about `limit` touched bytes stay without a user.

    `resident_bytes`: the touched bytes, in whole chunks. `peak_bytes`: the most they were. `mappings`: how often they
    grew. `live_bytes`: the bytes of regions that have a user. `reserve`: bytes of address space to ask for at a time.
    `observer`, for measurements, is called with the bytes of a region when it is taken, and with their negative when it
    is given back or its tensor dies.
    """

    def __init__(self, limit: int = 256 << 20, reserve: int | None = None) -> None:
        self.limit = limit
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.mappings = 0
        self.live_bytes = 0
        self.observer: Callable[[int], object] | None = None
        self._reserve = reserve
        self._arenas: list[Arena] = []
        self._guard: Guard[Region] = Guard(self._recycle)

    @property
    def idle_bytes(self) -> int:
        """The touched bytes without a user."""
        return self.resident_bytes - self.live_bytes

    def take(self, nbytes: int) -> Region:
        """A page-aligned region of at least `nbytes` > 0, with any content.

        Raises: OSError if there is no memory.
        """
        nbytes = round_up(nbytes)
        self._guard.drain()
        with self._guard.lock:
            for arena in self._arenas:
                taken = arena.take(nbytes)
                if taken:
                    break
            else:
                arena = Arena(map_range(nbytes, self._reserve))
                self._arenas.append(arena)
                taken = arena.take(nbytes)
            assert taken, "a new range has room"
            offset, fresh = taken
            self.live_bytes += nbytes
            self._count(fresh)
            if self.observer:
                self.observer(nbytes)
            return Region(arena, offset, nbytes)

    def give(self, region: Region) -> None:
        """Takes a region back from its user."""
        if self.observer:
            self.observer(-region.nbytes)
        self._guard.later(region)

    def tensor(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, nbytes: int, phase: int
    ) -> torch.Tensor:
        """A CPU tensor of that layout, with any content. It spans `nbytes`; its address is `phase` modulo a page."""
        region = self.take(phase + nbytes)
        memory = region.arena.view(region.address - region.arena.address + phase, nbytes)
        self._guard.watch(memory, region)
        if self.observer:  # called at the death itself, which the guard handles later
            weakref.finalize(memory, self.observer, -region.nbytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)

    def trim(self) -> None:
        """Gives idle memory back to the kernel."""
        self._guard.drain()
        with self._guard.lock:
            self._shrink(0)

    def after_fork(self) -> None:
        """In the child: a fresh lock and no arena, because another thread may have been changing them.

        Inherited tensors keep their memory, which is not counted.
        """
        self._guard.reset()
        self._arenas = []
        self.resident_bytes = self.peak_bytes = self.live_bytes = 0

    def _count(self, fresh: int) -> None:
        if fresh:
            self.mappings += 1
            self.resident_bytes += fresh
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _recycle(self, region: Region) -> None:
        if not region.taken:
            return  # a signal interrupted the guard, which calls again
        region.taken = False
        if region.arena not in self._arenas:
            return  # from before a fork
        region.arena.give(region.address - region.arena.address, region.nbytes)
        self.live_bytes -= region.nbytes
        self._shrink(self.limit)

    def _shrink(self, limit: int) -> None:
        for arena in reversed(self._arenas):
            if self.idle_bytes <= limit:
                return
            self.resident_bytes -= arena.shrink(self.idle_bytes - limit)


POOL = BufferPool()
