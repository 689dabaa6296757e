"""Pinned host memory in large chunks: the first chunk with room serves, by best fit within it.

PyTorch's own allocator rounds every request up to a power of two: a third more on average, twice at worst. So a chunk
is as large as that, and the rest of it serves others. PyTorch also pins memory anew whenever a size is new, which stops
the device.
"""

from __future__ import annotations

import errno
import threading
from collections import deque

import torch
from torch import Tensor

from ssd_fx.runtime.device.streams import Streams
from ssd_fx.runtime.memory.buffers import PAGE
from ssd_fx.runtime.memory.free_extents import FreeExtents
from ssd_fx.runtime.memory.numa import near

LEAST, MOST = 4 << 20, 256 << 20  # bytes that are pinned at a time; a larger tensor has a chunk of its own


def _power_of_two(nbytes: int) -> int:
    """The smallest that is `nbytes` > 0 or more."""
    return 1 << (nbytes - 1).bit_length()


class _Chunk:
    """Memory that was pinned at once. `back`: (offset, size) of what has come back and is not free yet."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = FreeExtents(memory.numel())
        self.back: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> Piece | None:
        while self.back:
            self.free.free(*self.back.popleft())
        offset = self.free.allocate(size)
        return None if offset is None else Piece(self, offset, size)


class Piece:
    """Memory of a chunk, until this object is dropped. `tensor`: all of it, uint8."""

    __slots__ = ("_back", "_place", "tensor")

    def __init__(self, chunk: _Chunk, offset: int, size: int) -> None:
        self._back = chunk.back
        self._place = (offset, size)
        self.tensor = chunk.memory[offset : offset + size]

    def __del__(self) -> None:
        self._back.append(self._place)  # no lock: a garbage collection may come while this thread has it


class Pinned:
    """Chunks of pinned memory near a device. They stay, and each new one is as large as all before, within bounds."""

    def __init__(self, queued: Streams, device: torch.device) -> None:
        self._queued = queued
        self._device = device
        self._chunks: list[_Chunk] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The bytes that are pinned."""
        return sum(chunk.memory.numel() for chunk in self._chunks)

    def take(self, nbytes: int) -> Piece:
        """Memory for `nbytes` > 0, at a page of its chunk.

        Raises:
            OSError: there is no memory.
        """
        size = -(-nbytes // PAGE) * PAGE
        with self._lock:
            for chunk in self._chunks:
                found = chunk.take(size)
                if found:
                    return found
            try:
                with near(self._device):
                    made = _Chunk(self._queued.pinned(_power_of_two(max(size, min(self.nbytes, MOST), LEAST))))
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, f"no pinned memory for a tensor of {nbytes} B") from error
            self._chunks.append(made)
            piece = made.take(size)
            assert piece, "the chunk is as large as that"
            return piece
