"""What is on its way out of memory: how much may be, and the copies that go on although nobody wants them any more."""

from __future__ import annotations

from collections import deque

import torch

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
        self._row: deque[tuple[streams.Queued, torch.UntypedStorage, int]] = deque()  # what each reads, and its bytes

    def __len__(self) -> int:
        return len(self._row)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self._row)

    def add(self, copy: streams.Queued, read: torch.UntypedStorage, nbytes: int) -> None:
        self._row.append((copy, read, nbytes))

    def oldest(self) -> streams.Queued | None:
        return self._row[0][0] if self._row else None

    def let_go(self) -> None:
        """Drops what has been copied.

        A backward gives away first what was stored last, and a row of micro-batches the first of them. So both ends are
        looked at.
        """
        row = self._row
        while row and row[0][0].done():
            row.popleft()
        while row and row[-1][0].done():
            row.pop()

    def end(self) -> None:
        """Returns when all have ended."""
        for copy, _, _ in self._row:
            copy.cancel()
        self._row.clear()
