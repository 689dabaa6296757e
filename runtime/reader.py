"""Tensors on their way back: from memory while they are still there, else from the disk. All but `complete` locked.

What a load returns is `alias(stored bytes, layout)` wherever those bytes are: every source gives the same tensor.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ssd_fx.runtime import trace
from ssd_fx.runtime.engines.base import Engine, Extent, Memory, outcome
from ssd_fx.runtime.entries import GUARD, Entry, Load, State, lost
from ssd_fx.runtime.layout import Layout, alias, is_alone, returned
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.stats import counters
from ssd_fx.runtime.writer import Writer, drop

ATTEMPTS = 3
ALIGNMENT = 16  # bytes that Inductor takes what a graph makes to be aligned to, on a device
now = time.perf_counter


class Reader:
    """Begins loads and completes them."""

    def __init__(self, engine: Engine, writer: Writer) -> None:
        self._engine, self._writer = engine, writer
        self.outstanding_bytes = 0  # of reads that were begun and not waited for

    def begin(self, entry: Entry, asked: Layout, seq: int, *, consume: bool, relies_on: str) -> Load:
        """A load for a reader that `relies_on` parts of the asked layout, noted down in the entry; its read, if it
        needs one, is yet to be started.

        Raises: RuntimeError if the tensor was changed in place, given away before, or cannot be had in that layout.
        """
        layout = returned(entry.seen, asked, relies_on, entry.name)
        if entry.counter is not None and entry.counter._version != entry.version:
            raise RuntimeError(_changed_in_place(entry, entry.counter._version))
        match entry.state:
            case State.GIVEN:
                raise RuntimeError(
                    f"{entry.name} was given away to a backward that did not keep the graph; a graph that several "
                    "backwards go through needs retain_graph=True in all but the last"
                )
            case State.LOST:
                raise lost(entry)
            case State.IN_MEMORY:
                load = self._forward(entry, layout, seq, consume, relies_on)
                entry.loads.append(load)
                return load
            case State.ON_DISK if not entry.nbytes:
                size, stride, dtype = layout
                out = torch.empty_strided(size, stride, dtype=dtype, device=entry.device)
                return Load(out, out, None, seq)
            case State.ON_DISK:
                return self._read(entry, layout, seq)

    def ahead(self, entry: Entry) -> None:
        """Begins a read that nobody asked for yet; `begin` will find it."""
        landing = self._landing(entry)
        entry.ahead = Load(landing, landing, self._engine.read(_extent(entry), Memory.of(landing)), -1)
        self._count(entry.ahead, entry.moved_bytes)
        counters(entry.graph).prefetched_bytes += entry.moved_bytes
        self.start(entry.ahead)

    def drop_ahead(self, entry: Entry) -> None:
        """Ends a read that nobody is going to ask for."""
        ahead, entry.ahead = entry.ahead, None
        if ahead and ahead.read:
            ahead.read.cancel()
            self._count(ahead, 0)

    def start(self, load: Load) -> None:
        """Starts the load's read, once it is noted down with its entry."""
        if load.read and not load.started:
            load.started = True
            load.read.start()

    def forget(self, entry: Entry) -> None:
        """The entry dies: ends its reads."""
        self.drop_ahead(entry)
        for load in entry.loads:
            if load.read:
                load.read.cancel()
                self._count(load, 0)
        entry.loads.clear()

    def done(self, entry: Entry, load: Load) -> None:
        """A load was waited for."""
        entry.loads.remove(load)
        self._count(load, 0)

    def complete(self, entry: Entry, load: Load) -> OSError | None:
        """Waits for a load's bytes, trying again after an error; the last error. Takes the lock itself."""
        error = outcome(load.read) if load.read else None
        for _ in range(ATTEMPTS - 1):
            if error is None:
                break
            with GUARD.lock:
                load.read = self._engine.read(_extent(entry), Memory.of(load.landing))
                load.read.start()
            error = outcome(load.read)
        if load.read:
            span, how, engine = load.read.span(), "failed" if error else "ok", self._engine.name
            trace.transfer("read", entry.graph, entry.slot, load.seq, span, entry.moved_bytes, how, engine)
        if error is None and load.read:
            counters(entry.graph).read_bytes += entry.moved_bytes
            _place(entry, load)
        return error

    def _forward(self, entry: Entry, layout: Layout, seq: int, consume: bool, relies_on: str) -> Load:
        """From memory: the stored tensor itself if it may be given away and nobody else has it, else a copy."""
        held, same = entry.held, layout == entry.seen
        assert held is not None, "in memory"
        if entry.encoded:
            load = Load(self._new(entry, layout), held, None, seq, same)
            _place(entry, load)
            return load
        if consume and same and _may_begin_there(held, relies_on) and is_alone(held):
            out = alias(held, layout)  # first: a write that had ended after all lets go of `held`
            self._writer.cancel(entry)
            drop(entry)
            entry.storage = None  # the backward has it now, which says nothing about what the write freed
            return Load(out, out, None, seq)
        out = self._new(entry, layout)
        if same:
            tensors.copy_bytes(alias(out, entry.layout), held)
        else:
            tensors.copy_elements(out, alias(held, entry.seen))
        return Load(out, out, None, seq)

    def _read(self, entry: Entry, layout: Layout, seq: int) -> Load:
        ahead, same = entry.ahead, layout == entry.seen
        landing = ahead.landing if ahead else self._landing(entry)
        if entry.encoded or not same:
            out = self._new(entry, layout)
        else:
            out = landing if layout == entry.layout else alias(landing, layout)
        if ahead:  # it keeps its owner until the load is noted down: something may raise in between
            load = Load(out, landing, ahead.read, seq, same, started=True)
            entry.loads.append(load)
            entry.ahead, ahead.read = None, None
            self._count(ahead, 0)
        else:
            load = Load(out, landing, self._engine.read(_extent(entry), Memory.of(landing)), seq, same)
            entry.loads.append(load)
        self._count(load, entry.moved_bytes)
        return load

    def _new(self, entry: Entry, layout: Layout) -> Tensor:
        """Memory for a tensor of `layout`; it begins its storage."""
        if layout != entry.seen:
            return tensors.empty(layout, entry.device)
        stored = tensors.empty(entry.layout, entry.device, entry.ptr % 4096)
        return stored if layout == entry.layout else alias(stored, layout)

    def _count(self, load: Load, nbytes: int) -> None:
        """So many bytes of the window are the load's."""
        self.outstanding_bytes += nbytes - load.counted
        load.counted = nbytes

    def _landing(self, entry: Entry) -> Tensor:
        """Where the bytes will arrive: of the same phase as what was stored, so that a read needs no copy."""
        if entry.encoded:
            return tensors.empty(Layout((entry.encoded.nbytes,), (1,), torch.uint8), entry.device)
        return tensors.empty(entry.layout, entry.device, entry.ptr % 4096)


def _extent(entry: Entry) -> Extent:
    if entry.lost:
        raise lost(entry)
    assert entry.extent, "on disk"
    return entry.extent


def _may_begin_there(held: Tensor, relies_on: str) -> bool:
    """Whether the backward can use this memory as it is.

    `as_strided` counts from the start of the storage, unless Inductor made an address of it. Inductor's kernels for a
    device take 16 bytes at a time of what it loads, and its code compares the offset alone with that.
    """
    if relies_on != "address":
        return held.storage_offset() == 0
    offset = held.storage_offset() * held.itemsize
    return held.device.type == "cpu" or (held.data_ptr() % ALIGNMENT == 0 and offset % ALIGNMENT == 0)


def _place(entry: Entry, load: Load) -> None:
    """The bytes have landed; if that is not in `out` already, they go there."""
    stored = load.landing
    if entry.encoded:
        stored = alias(load.out, entry.layout) if load.same else tensors.empty(entry.layout, entry.device)
        entry.encoded.decode(load.landing, stored)
    if not load.same:
        tensors.copy_elements(load.out, alias(stored, entry.seen))


def _changed_in_place(entry: Entry, version: int) -> str:
    kind = f"torch.{'cuda.' if entry.device.type == 'cuda' else ''}{_TYPE_NAMES.get(entry.layout.dtype, 'Tensor')}"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(entry.layout.size)}], stored by ssd_fx as {entry.name}, is at version {version}; "
        f"expected version {entry.version} instead"
    )


_TYPE_NAMES = {torch.float32: "FloatTensor", torch.float64: "DoubleTensor", torch.float16: "HalfTensor"}
_TYPE_NAMES |= {torch.bfloat16: "BFloat16Tensor", torch.int64: "LongTensor", torch.bool: "BoolTensor"}
