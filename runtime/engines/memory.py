"""The engine in host memory, which is also the tier before the drive."""

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Copy, Extent, Memory, not_readable
from ssd_fx.runtime.memory.buffers import Buffer


class _HostExtent(Extent):
    """`buffer` holds a CPU tensor's bytes, `pinned` those of a device with streams. `reader`: the tensor's device."""

    __slots__ = ("buffer", "pinned", "reader")

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, "memory")
        self.buffer: Buffer | None = None
        self.pinned: torch.Tensor | None = None
        self.reader = torch.device("cpu")


class MemoryEngine:
    """Extents are host memory and transfers are copies: the reference that others are compared with.

    Torch rounds pinned memory up to a power of two, so what is stored from a GPU may take twice its size here.
    """

    name = "memory"
    devices = frozenset({"cpu", "cuda"})
    disk_bytes = 0

    def __init__(self) -> None:
        self._sides = streams.SideStreams()

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return _HostExtent(nbytes)  # `write` allocates the memory, because it knows the device

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, _HostExtent)
        extent.buffer = extent.pinned = None

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        extent.reader = memory.reader
        queued = streams.of(memory.reader)
        if queued:
            extent.pinned = queued.pinned(memory.nbytes)
            if memory.home:
                return Copy(extent.pinned.data_ptr(), memory.ptr, memory.nbytes, extent.pinned)
            return self._copy(queued, memory, extent.pinned, write=True)
        extent.buffer = Buffer(memory.nbytes)
        return Copy(extent.buffer.address, memory.ptr, memory.nbytes, extent.buffer)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        queued = streams.of(memory.device)
        if queued and extent.pinned is not None:
            return self._copy(queued, memory, extent.pinned, write=False)
        if not queued and extent.buffer:
            return Copy(memory.ptr, extent.buffer.address, memory.nbytes, extent.buffer)
        raise not_readable(extent.reader, memory.device)

    def located(self, extent: Extent) -> Memory:
        """The host memory of an extent, which must have been written."""
        assert isinstance(extent, _HostExtent)
        if extent.pinned is not None:
            return Memory(extent.pinned.data_ptr(), extent.nbytes, torch.device("cpu"), extent.reader)
        assert extent.buffer, "it was written"
        return Memory(extent.buffer.address, extent.nbytes, torch.device("cpu"))

    def _copy(self, queued: streams.Streams, memory: Memory, pinned: torch.Tensor, write: bool) -> Completion:
        def enqueue(side: streams.Stream) -> streams.Check:
            ours = queued.view(memory.ptr, memory.nbytes, memory.device)
            target, source = (pinned, ours) if write else (ours, pinned)
            queued.copy(side, target, source)
            return lambda: None

        return streams.Queued(memory.device, self._sides.get(memory.device, write), enqueue)

    def failed(self, extent: Extent, error: OSError) -> None:
        raise AssertionError(f"a copy in memory cannot fail: {error}")

    def close(self) -> None:
        return
