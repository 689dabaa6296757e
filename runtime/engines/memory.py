"""The engine in host memory, which is also the tier before the drive."""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Completion, Copy, Extent, Memory, not_readable
from ssd_fx.runtime.memory.buffers import Buffer
from ssd_fx.runtime.memory.pinned import Piece, Pinned

_CPU = torch.device("cpu")


@dataclass(eq=False, slots=True)
class _HostExtent(Extent):
    """`buffer` holds a CPU tensor's bytes, `pinned` those of a device with streams. `reader`: the tensor's device.

    `written`: the copy that fills `pinned`, which may be under way.
    """

    on_drive = False
    buffer: Buffer | None = None
    pinned: Piece | None = None
    reader: torch.device = _CPU
    written: streams.Queued | None = None


class MemoryEngine:
    """Extents are host memory and transfers are copies: the reference that other engines are compared with.

    A copy may go on after its extent was freed (`Writer.give_away`, `Queued.follow`). It keeps its host memory until it
    has ended. Copies by the host wait for no stream, so they have memory of their own, which no
    copy in a stream ever gets.
    """

    name = "memory"

    def __init__(self, ranks: int = 1) -> None:
        self.devices = frozenset({"cpu", "cuda", streams.accelerator() or "cuda"})
        self._ranks = ranks
        self._sides = streams.SideStreams()
        self._pinned: dict[tuple[torch.device, bool], Pinned] = {}  # by device, and whether the host fills it
        # Copies under way, by whether they write, with the host memory that they use. Each lane is first in, first out.
        self._moving: dict[bool, deque[tuple[streams.Queued, Piece]]] = {True: deque(), False: deque()}

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        return _HostExtent(nbytes)  # `write` allocates the memory, because it knows the device

    def free(self, extent: Extent) -> None:
        assert isinstance(extent, _HostExtent)
        extent.buffer = extent.pinned = extent.written = None

    def write(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        extent.reader = memory.reader
        queued = streams.of(memory.reader)
        if queued:
            extent.pinned = self._take(queued, memory)
            if memory.home:
                return Copy(extent.pinned.tensor.data_ptr(), memory.ptr, memory.nbytes, extent.pinned)
            extent.written = self._copy(queued, memory, extent.pinned, write=True)
            return extent.written
        extent.buffer = Buffer(memory.nbytes)
        return Copy(extent.buffer.address, memory.ptr, memory.nbytes, extent.buffer)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        assert isinstance(extent, _HostExtent)
        queued = streams.of(memory.device)
        if queued and extent.pinned is not None:
            return self._copy(queued, memory, extent.pinned, write=False, behind=extent.written)
        if not queued and extent.buffer:
            return Copy(memory.ptr, extent.buffer.address, memory.nbytes, extent.buffer)
        raise not_readable(extent.reader, memory.device)

    def located(self, extent: Extent) -> Memory:
        """The host memory of an extent, which must have been written."""
        assert isinstance(extent, _HostExtent)
        if extent.pinned is not None:
            return Memory(extent.pinned.tensor.data_ptr(), extent.nbytes, _CPU, extent.reader)
        assert extent.buffer, "it was written"
        return Memory(extent.buffer.address, extent.nbytes, _CPU)

    def _take(self, queued: streams.Streams, memory: Memory) -> Piece:
        device = memory.reader
        by_host = memory.home is not None
        found = self._pinned.get((device, by_host))
        if found is None:
            found = self._pinned[device, by_host] = Pinned(queued, device, self._ranks, self._reap)
        return found.take(memory.nbytes)

    def _copy(
        self,
        queued: streams.Streams,
        memory: Memory,
        pinned: Piece,
        *,
        write: bool,
        behind: streams.Queued | None = None,
    ) -> streams.Queued:
        """A copy on a side stream. `behind`: a copy that must end first, which may still run (`Writer.follow`)."""

        nbytes, device = memory.nbytes, memory.device

        def enqueue(side: streams.Stream) -> None:
            if behind is not None:
                behind.follow(side)
            ours = queued.view(memory.ptr, nbytes, device)
            theirs = pinned.tensor
            if theirs.numel() != nbytes:
                theirs = theirs[:nbytes]
            target, source = (theirs, ours) if write else (ours, theirs)
            queued.copy(side, target, source)
            self._moving[write].append((copy, pinned))

        copy = streams.Queued(queued, device, self._sides.get(queued, device, write), enqueue, may_fail=False)
        return copy

    def _reap(self) -> None:
        """Drops copies that have ended. A device may copy long after the host has freed an extent (`Queued.follow`)."""
        for moving in self._moving.values():
            while moving and moving[0][0].done():
                moving.popleft()

    def failed(self, extent: Extent, error: OSError) -> None:
        raise AssertionError(f"a copy in memory cannot fail: {error}")

    def close(self) -> None:
        with ExitStack() as closing:  # last first; if one fails, as after an error of the GPU, the others go on
            closing.callback(self._pinned.clear)
            closing.callback(self._sides.close)
            for moving in self._moving.values():
                closing.callback(moving.clear)
                for copy, _ in list(moving):  # another thread may see one end
                    closing.callback(copy.cancel)
