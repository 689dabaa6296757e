"""Files for devices whose memory the I/O threads cannot reach: every transfer goes through pinned host memory.

This works on every device of torch.accelerator. It is slower than the staging of engine "posix" on CUDA
(`native/staging.h`): each tensor is copied whole before its first byte is written, and pinned memory is allocated for
each transfer.
"""

from __future__ import annotations

import errno
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Copy, Engine, Extent, Memory
from ssd_fx.runtime.engines.chain import Chain
from ssd_fx.runtime.memory.buffers import PAGE


class _Staging:
    """Host memory for a tensor of `nbytes`: `whole` has full pages, and `tensor` the bytes of the tensor."""

    def __init__(self, nbytes: int, queued: streams.Streams | None) -> None:
        padded = _pages(nbytes)
        try:
            found = queued.pinned(padded + PAGE) if queued else torch.empty(padded + PAGE, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no pinned memory for a tensor of {nbytes} B") from error
        start = -found.data_ptr() % PAGE
        self.tensor = found[start : start + nbytes]
        self.whole = found[start : start + padded]
        self.whole[nbytes:].zero_()  # no bytes of other tensors go to the disk


class StagedEngine:
    """`files`, an engine for host memory, with pinned memory between it and devices of the type `device`.

    The extents are those of `files`. They have whole pages.
    """

    def __init__(self, files: Engine, device: str) -> None:
        self.name = files.name
        self.devices = files.devices | {device}
        self._files = files
        self._sides = streams.SideStreams()
        self._writes = ThreadPoolExecutor(1, "ssd_fx-staged")  # two threads, so that no load waits for stores
        self._reads = ThreadPoolExecutor(1, "ssd_fx-staged")
        warnings.warn(
            f"ssd_fx has no fast way between {device} and files: tensors go through pinned memory, one copy each",
            RuntimeWarning,
            stacklevel=2,
        )

    @property
    def disk_bytes(self) -> int:
        return self._files.disk_bytes

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return self._files.alloc(_pages(nbytes), tier)

    def free(self, extent: Extent) -> None:
        self._files.free(extent)

    def write(self, extent: Extent, memory: Memory) -> Completion:
        queued = streams.of(memory.device)
        staging = _Staging(memory.nbytes, queued)
        file = self._files.write(extent, Memory.of(staging.whole))
        if not queued:
            return Chain(Copy(staging.tensor.data_ptr(), memory.ptr, memory.nbytes), file, self._writes, staging)

        def enqueue(side: streams.Stream) -> None:
            queued.copy(side, staging.tensor, _on_device(memory, queued))

        copy = streams.Queued(memory.device, self._sides.get(memory.device, write=True), enqueue)
        return Chain(copy, file, self._writes, staging)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        queued = streams.of(memory.device)
        staging = _Staging(memory.nbytes, queued)
        file = self._files.read(extent, Memory.of(staging.whole))
        if not queued:
            return Chain(file, Copy(memory.ptr, staging.tensor.data_ptr(), memory.nbytes), self._reads, staging)
        with queued.on(memory.device):  # what was queued before the caller got `memory` may still use it
            ready = queued.record(queued.current(memory.device))

        def enqueue(side: streams.Stream) -> None:
            side.wait_event(ready)
            queued.copy(side, _on_device(memory, queued), staging.tensor)

        copy = streams.Queued(memory.device, self._sides.get(memory.device, write=False), enqueue)
        return Chain(file, copy, self._reads, staging)

    def failed(self, extent: Extent, error: OSError) -> None:
        self._files.failed(extent, error)

    def close(self) -> None:
        self._writes.shutdown()
        self._reads.shutdown()
        self._files.close()


def needed() -> str | None:
    """The type of the device for which files need `StagedEngine`, if this process computes on one."""
    found = streams.accelerator()
    return None if found is None or (found == "cuda" and torch.version.hip is None) else found


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _on_device(memory: Memory, queued: streams.Streams) -> torch.Tensor:
    return queued.view(memory.ptr, memory.nbytes, memory.device)
