"""What is on its way out of memory: how much may be, and the copies that go on although nobody wants them any more."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssd_fx.compat import _storage_Use_Count
from ssd_fx.runtime.device import streams

LEAST_BYTES = 128 << 20  # that may be on their way where the option `inflight` does not say
SHARE = 32  # or one of so many parts of a device's memory


def inflight_bytes(device: torch.device) -> int:
    """How much of a device may be on its way out of memory at a time, where the option `inflight` does not say.

    Of a device with streams it is more. The host runs ahead of it, and a store that has to wait for room stops the
    host. Where one tensor fills the room, the device soon has nothing to do (docs/results/gpu, "Steps on that H200").
    """
    queued = streams.of(device)
    return max(LEAST_BYTES, queued.memory_bytes(device) // SHARE) if queued else LEAST_BYTES


class CopiesInVain:
    """Copies on streams whose tensors were given away meanwhile, or died. Nobody else gets what they read."""

    def __init__(self) -> None:
        self._row: list[_InVain] = []

    def __len__(self) -> int:
        return len(self._row)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._row) if self._row else 0

    def add(self, copy: streams.Queued, read: torch.UntypedStorage, nbytes: int, stream: streams.Stream | None) -> None:
        """A copy of so many bytes that reads a storage of `stream`."""
        self._row.append(_InVain(copy, read, nbytes, stream))

    def oldest(self) -> streams.Queued | None:
        return self._row[0].copy if self._row else None

    def let_go(self) -> None:
        """Drops what has been copied, and what the backward has used.

        The host runs ahead of its device, and would see a copy end long after the backward has dropped the tensor. So
        the stream of the memory waits for the copy then, and gives the memory to others behind it.

        A backward gives away first what was stored last, and a row of micro-batches the first of them. So both ends are
        asked whether they have ended.
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

    def end(self) -> None:
        """Returns when all have ended."""
        for each in self._row:
            each.copy.cancel()
        self._row.clear()


class _InVain(NamedTuple):
    copy: streams.Queued
    read: torch.UntypedStorage
    nbytes: int
    stream: streams.Stream | None

    def is_ours_alone(self) -> bool:
        """Whether no tensor is left on the storage.

        If one comes later all the same, its memory goes back in order, too: the stream waits for the copy already.
        """
        return bool(_storage_Use_Count(self.read._cdata) == 1)
