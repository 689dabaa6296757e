"""The engine in host memory, which is also the tier before the drive."""

from contextlib import ExitStack

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Copy, Extent, Memory, not_readable
from ssd_fx.runtime.memory.buffers import Buffer
from ssd_fx.runtime.memory.pinned import Piece, Pinned


class _HostExtent(Extent):
    """`buffer` holds a CPU tensor's bytes, `pinned` those of a device with streams. `reader`: the tensor's device."""

    on_drive = False

    __slots__ = ("buffer", "pinned", "reader")

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes, "memory")
        self.buffer: Buffer | None = None
        self.pinned: Piece | None = None
        self.reader = torch.device("cpu")


class MemoryEngine:
    """Extents are host memory and transfers are copies: the reference that others are compared with.

    A copy from a device may go on after its extent was freed (`Writer.give_away`). The next one into the same memory is
    queued behind it. What the host copies, which waits for no stream, goes to memory that no such copy ever gets.
    """

    name = "memory"
    disk_bytes = 0

    def __init__(self) -> None:
        self.devices = frozenset({"cpu", "cuda", streams.accelerator() or "cuda"})
        self._sides = streams.SideStreams()
        self._pinned: dict[tuple[torch.device, bool], Pinned] = {}  # and whether the host fills it
        self._reads: dict[streams.Queued, Piece] = {}  # those under way, with the memory that they read

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        self._reap()
        return _HostExtent(nbytes)  # `write` allocates the memory, because it knows the device

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, _HostExtent)
        extent.buffer = extent.pinned = None

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        extent.reader = memory.reader
        queued = streams.of(memory.reader)
        if queued:
            extent.pinned = self._take(queued, memory)
            if memory.home:
                return Copy(extent.pinned.tensor.data_ptr(), memory.ptr, memory.nbytes, extent.pinned)
            return self._copy(queued, memory, extent.pinned, write=True)
        extent.buffer = Buffer(memory.nbytes)
        return Copy(extent.buffer.address, memory.ptr, memory.nbytes, extent.buffer)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        self._reap()
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
            return Memory(extent.pinned.tensor.data_ptr(), extent.nbytes, torch.device("cpu"), extent.reader)
        assert extent.buffer, "it was written"
        return Memory(extent.buffer.address, extent.nbytes, torch.device("cpu"))

    def _take(self, queued: streams.Streams, memory: Memory) -> Piece:
        device = memory.reader
        with queued.on(device):
            by_host = memory.home is not None
            return self._pinned.setdefault((device, by_host), Pinned(queued, device)).take(memory.nbytes)

    def _copy(self, queued: streams.Streams, memory: Memory, pinned: Piece, write: bool) -> Completion:
        def enqueue(side: streams.Stream) -> None:
            ours = queued.view(memory.ptr, memory.nbytes, memory.device)
            theirs = pinned.tensor[: memory.nbytes]
            target, source = (theirs, ours) if write else (ours, theirs)
            queued.copy(side, target, source)
            if not write:
                self._reads[copy] = pinned

        copy = streams.Queued(memory.device, self._sides.get(memory.device, write), enqueue, may_fail=False)
        return copy

    def _reap(self) -> None:
        """Lets go of what was read. A device may read long after the host has freed the extent (`Queued.follow`)."""
        for read in list(self._reads):
            if not read.done():
                return
            del self._reads[read]

    def failed(self, extent: Extent, error: OSError) -> None:
        raise AssertionError(f"a copy in memory cannot fail: {error}")

    def close(self) -> None:
        with ExitStack() as closing:  # upwards; if one fails, as after an error of the GPU, the others do not
            closing.callback(self._pinned.clear)
            closing.callback(self._reads.clear)
            for read in self._reads:
                closing.callback(read.cancel)
