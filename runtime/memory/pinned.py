"""Pinned host memory: chunks that are cut into pieces, by best fit. A piece that comes back waits for a like request.

Pinning stops the device, so chunks stay, and each new one is as large as all before together, within bounds. The size
of a chunk is a power of two, as with PyTorch's allocator, and the rest of it serves other requests. A large tensor has
a chunk of its own, of the size asked for.

The kernel cannot take pinned memory back, and kills a process when no other memory is left. So this process pins no
more than `SHARE` of what its machine or container would have free without that, divided among the ranks.
"""

from __future__ import annotations

import errno
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_fx.runtime.device.streams import Streams
from ssd_fx.runtime.memory.available import available_bytes
from ssd_fx.runtime.memory.buffers import PAGE
from ssd_fx.runtime.memory.free_extents import FreeExtents
from ssd_fx.runtime.memory.numa import near
from ssd_fx.runtime.pause import Pause

LEAST, MOST = 4 << 20, 256 << 20  # bytes that are pinned at a time; a larger tensor has a chunk of its own
SHARE = 0.75  # of the memory that would be free without ours


def _power_of_two(nbytes: int) -> int:
    """The smallest power of two that is at least `nbytes` > 0."""
    return 1 << (nbytes - 1).bit_length()


class _Chunk:
    """Memory that was pinned at once."""

    __slots__ = ("__weakref__", "free", "memory")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = FreeExtents(memory.numel())


_chunks: weakref.WeakSet[_Chunk] = weakref.WeakSet()
"""All chunks of this process."""


def pinned_bytes() -> int:
    """The bytes that this process has pinned for tensors of devices."""
    return sum(chunk.memory.numel() for chunk in _chunks)


class _Place(NamedTuple):
    chunk: _Chunk
    offset: int
    memory: Tensor


class Piece:
    """Memory of a chunk, until this object is dropped. `tensor`: all of it, uint8."""

    __slots__ = ("_back", "_place", "tensor")

    def __init__(self, back: deque[_Place], place: _Place) -> None:
        self._back = back
        self._place = place
        self.tensor = place.memory

    def __del__(self) -> None:
        self._back.append(self._place)  # any thread may come here, in a garbage collection too


class Pinned:
    """The chunks near a device of one of `ranks` processes.

    `let_go`: called if no piece of a size is free; it may drop some. `take` is called by one thread at a time.
    """

    def __init__(
        self, queued: Streams, device: torch.device, ranks: int = 1, let_go: Callable[[], None] = lambda: None
    ) -> None:
        self._queued = queued
        self._device = device
        self._ranks = ranks
        self._let_go = let_go
        self._chunks: list[_Chunk] = []
        self._back: dict[int, deque[_Place]] = {}  # by size, the pieces that came back
        self._no_growth = Pause()

    @property
    def nbytes(self) -> int:
        """The bytes that are pinned."""
        return sum(chunk.memory.numel() for chunk in self._chunks)

    def take(self, nbytes: int) -> Piece:
        """Memory for `nbytes` > 0, at a page of its chunk.

        Raises:
            OSError: it would be more than our share, or there is none. Then nothing is pinned for a while.
        """
        size = -(-nbytes // PAGE) * PAGE
        back = self._back.get(size)
        if back is None:
            back = self._back.setdefault(size, deque())
        try:
            return Piece(back, back.pop())
        except IndexError:
            return Piece(back, self._find(size, back))

    def _find(self, size: int, back: deque[_Place]) -> _Place:
        """A place that has come back meanwhile, or is cut from a chunk."""
        self._let_go()
        if back:
            return back.pop()
        if found := self._cut(size):
            return found
        self._join()
        return self._cut(size) or self._grow(size)

    def _cut(self, size: int) -> _Place | None:
        for chunk in self._chunks:
            offset = chunk.free.allocate(size)
            if offset is not None:
                return _Place(chunk, offset, chunk.memory[offset : offset + size])
        return None

    def _join(self) -> None:
        """Gives pieces that came back to their chunks, where neighbours become one, so that other sizes fit."""
        for size, places in self._back.items():
            while places:
                chunk, offset, _ = places.popleft()
                chunk.free.free(offset, size)

    def _grow(self, size: int) -> _Place:
        """A place in a new chunk. Raises: as `take`."""
        if self._no_growth:
            raise OSError(errno.ENOMEM, f"no pinned memory for {size} B: there was none a moment ago")
        ours = pinned_bytes()
        most = int(SHARE * (ours + available_bytes() // self._ranks))
        nbytes = size if size > MOST else _power_of_two(max(size, min(self.nbytes, MOST), LEAST))
        if ours + nbytes > most:
            nbytes = size
        if ours + nbytes > most:
            raise OSError(errno.ENOMEM, f"{size} B beside {ours} B would be more pinned memory than {most} B")
        try:
            with near(self._device), self._queued.on(self._device):
                made = _Chunk(self._queued.pinned(nbytes))
        except RuntimeError as error:
            self._no_growth.begin()
            raise OSError(errno.ENOMEM, f"no pinned memory for {size} B: {error}") from error
        _chunks.add(made)
        self._chunks.append(made)
        found = self._cut(size)
        assert found, "the chunk is as large as that"
        return found
