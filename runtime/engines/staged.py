"""Files for devices whose memory the I/O threads cannot reach: every transfer goes through pinned host memory.

This works on every device of torch.accelerator. It is slower than the staging of engine "posix" on CUDA
(`native/staging.h`): each tensor is copied whole before its first byte is written, and pinned memory is allocated for
each transfer.
"""

from __future__ import annotations

import errno
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Copy, Engine, Extent, Memory
from ssd_fx.runtime.engines.chain import Chain
from ssd_fx.runtime.memory.buffers import ALIGN


class _Staging:
    """Host memory for a tensor of `nbytes`: `tensor` has the bytes of the tensor, and `whole` the padding too.

    The write to the file is set up before the copy has filled the memory. So the engine of the files must not copy
    from it: what is aligned is written from where it is, and has no tail.
    """

    def __init__(self, nbytes: int, queued: streams.Streams | None) -> None:
        padded = _padded(nbytes)
        try:
            found = queued.pinned(padded + ALIGN) if queued else torch.empty(padded + ALIGN, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no pinned memory for a tensor of {nbytes} B") from error
        start = -found.data_ptr() % ALIGN
        self.tensor = found[start : start + nbytes]
        self.whole = found[start : start + padded]
        self.whole[nbytes:].zero_()  # no bytes of other tensors go to the disk


class StagedEngine:
    """`files`, an engine for host memory, with pinned memory between it and devices of the type `device`.

    The extents are those of `files`, of multiples of `ALIGN`.
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
        return self._files.alloc(_padded(nbytes), tier)

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
        # What was queued before the caller got `memory` may still use it. What comes while the file is read need not
        # end first, and another thread starts the copy, whose current stream is not the caller's.
        with queued.on(memory.device):
            ready = queued.record(queued.current(memory.device))

        def enqueue(side: streams.Stream) -> None:
            queued.copy(side, _on_device(memory, queued), staging.tensor)

        copy = streams.Queued(memory.device, self._sides.get(memory.device, write=False), enqueue, after=ready)
        return Chain(file, copy, self._reads, staging)

    def failed(self, extent: Extent, error: OSError) -> None:
        self._files.failed(extent, error)

    def close(self) -> None:
        with ExitStack() as closing:  # if one fails, or a Ctrl-C comes, the others are closed too
            closing.callback(self._sides.close)
            closing.callback(self._files.close)
            closing.callback(self._reads.shutdown)
            closing.callback(self._writes.shutdown)


def needed() -> str | None:
    """The type of the device for which files need `StagedEngine`, if this process computes on one."""
    found = streams.accelerator()
    return None if found is None or (found == "cuda" and torch.version.hip is None) else found


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _on_device(memory: Memory, queued: streams.Streams) -> torch.Tensor:
    return queued.view(memory.ptr, memory.nbytes, memory.device)
