"""Recycled page-aligned memory: what loads arrive in, and what small transfers bounce through.

The first touch of fresh memory costs as much as the read itself (64 MiB: 21 ms in huge pages, 52 ms in small ones,
10 ms to fill it again), so what was touched is used again. It is cut from one arena: a range of addresses that costs
nothing until it is touched, so that what one size gave back serves any other. A tensor gives its memory back when its
storage dies, whatever aliases of it exist by then.
"""

import weakref
from collections.abc import Callable

import torch

from ssd_fx.runtime.guard import Guard
from ssd_fx.runtime.memory.arena import PAGE, Arena, map_range, round_up

__all__ = ["PAGE", "POOL", "BufferPool", "Region"]


class Region:
    """`nbytes` at `address`, as long as nobody gave them back."""

    __slots__ = ("address", "arena", "nbytes", "taken")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self.arena, self.nbytes = arena, nbytes  # the reference keeps the range mapped
        self.address = arena.address + offset
        self.taken = True


class BufferPool:
    """Regions of recycled memory. At most about `limit` touched bytes stay without a user.

    `resident_bytes`: what may have memory behind it, in chunks; `peak_bytes`: the most that was; `mappings`: how often
    it grew. `live_bytes`: what somebody has. `reserve`: bytes of address space that are asked for at a time.
    `observer`, for measurements, is called with the bytes of what is taken, and negated when it is given back or dies.
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
        """What has memory behind it and no user."""
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
        """Takes a region back."""
        if self.observer:
            self.observer(-region.nbytes)
        self._guard.later(region)

    def tensor(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, nbytes: int, phase: int
    ) -> torch.Tensor:
        """A CPU tensor of that layout, spanning `nbytes`, whose data_ptr() is `phase` modulo a page; any content."""
        region = self.take(phase + nbytes)
        memory = region.arena.view(region.address - region.arena.address + phase, nbytes)
        self._guard.watch(memory, region)
        if self.observer:  # at the death itself: the guard deals with it later
            weakref.finalize(memory, self.observer, -region.nbytes)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)

    def trim(self) -> None:
        """Gives idle memory back to the kernel."""
        self._guard.drain()
        with self._guard.lock:
            self._shrink(0)

    def after_fork(self) -> None:
        """In the child: a fresh lock and no arena, for another thread may have been at work on it. Tensors that were
        inherited keep their memory, which is not counted."""
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
            return  # called again after a signal came in between, see Guard
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
