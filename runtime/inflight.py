"""Tensors on their way out of memory: how many bytes may be, and copies that go on though nobody wants them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssd_fx.compat import _storage_Use_Count
from ssd_fx.runtime.device import streams

LEAST_BYTES = 128 << 20  # bytes that may be on their way where the option `inflight` does not say
SHARE = 32  # or 1/SHARE of a device's memory, if that is more


def inflight_bytes(device: torch.device) -> int:
    """The most bytes of a device that may be on their way out of memory, where the option `inflight` does not say.

    For a device with streams and much memory it is more. The host runs ahead of it, and a store that has to wait for
    room stops the host. Where one tensor fills the room, the device soon has nothing to do (docs/results/gpu, "Steps on
    that H200").
    """
    queued = streams.of(device)
    return max(LEAST_BYTES, queued.memory_bytes(device) // SHARE) if queued else LEAST_BYTES


class CopiesInVain:
    """Copies on streams whose tensors were given away or died meanwhile. Nobody else gets the memory that they read.

    All methods but `wait` run under the lock of `entries`.
    """

    def __init__(self) -> None:
        self._row: list[_InVain] = []

    def __len__(self) -> int:
        return len(self._row)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._row) if self._row else 0

    def add(self, copy: streams.Queued, read: torch.UntypedStorage, nbytes: int, stream: streams.Stream | None) -> None:
        """Adds a copy of `nbytes` that reads the storage `read`. Its memory belongs to `stream`."""
        self._row.append(_InVain(copy, read, nbytes, stream))

    def oldest(self) -> streams.Queued | None:
        return self._row[0].copy if self._row else None

    def let_go(self) -> None:
        """Drops the copies that have ended, and those whose tensor the backward has dropped.

        The host runs ahead of its device, and would see a copy end long after the backward has dropped the tensor. So
        the stream of the memory is told to wait for the copy, and reuses the memory only afterwards.

        Within a backward the tensor stored last is given away first; of several micro-batches, the first one's are. So
        the copies at both ends of the row are asked whether they have ended.
        """
        row = self._row
        if not row:
            return
        while row and row[0].copy.done():
            del row[0]
        while row and row[-1].copy.done():
            row.pop()
        for each in [each for each in row if each.is_ours_alone() and each.copy.follow(each.stream)]:
            row.remove(each)

    def wait(self) -> None:
        """Returns when all copies have ended. Called without the lock: another thread may let go of some meanwhile."""
        for each in list(self._row):
            each.copy.cancel()


class _InVain(NamedTuple):
    copy: streams.Queued
    read: torch.UntypedStorage
    nbytes: int
    stream: streams.Stream | None

    def is_ours_alone(self) -> bool:
        """Whether no tensor is left on the storage.

        If a tensor comes later all the same, its memory is safe, too: the stream waits for the copy already.
        """
        return bool(_storage_Use_Count(self.read._cdata) == 1)
