"""Tensors on their way back: from memory while they are still there, else from the disk.

A load returns `alias(stored bytes, layout)`, whichever source the bytes come from.
All methods but `complete`, `follow` and `find` run under the lock of `entries`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from ssd_fx.runtime import errors, trace
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.arrival import Stall
from ssd_fx.runtime.device.streams import Queued
from ssd_fx.runtime.engines.base import Completion, Engine, Memory, outcome
from ssd_fx.runtime.entries import GUARD
from ssd_fx.runtime.layout import TensorMeta, alias, is_alone, is_foreign, returned
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.states import Entry, Ledger, Load, State
from ssd_fx.runtime.stats import counters
from ssd_fx.runtime.writer import Writer

ATTEMPTS = 3
AHEAD = -1  # the `seq` of a prefetch
ALIGNMENT = 16  # bytes: Inductor's kernels for a device assume that tensors made in the graph are aligned so


class Reader:
    """Begins loads and completes them."""

    def __init__(self, engine: Engine, ledger: Ledger, writer: Writer) -> None:
        self._engine = engine
        self._ledger = ledger
        self._writer = writer
        self.stalls: deque[tuple[Stall, str, int, bool]] = deque()  # with graph, slot, and whether the load is strict

    def begin(self, entry: Entry, wanted: TensorMeta, seq: int, *, consume: bool, relies_on: str) -> Load:
        """Begins a load for a graph that `relies_on` parts of the layout it asks for (`layout.RELIES_ON`).

        The load is noted down in the entry, unless the tensor is empty. If it needs a read, that has started.

        Raises: RuntimeError if the tensor was changed in place, was donated before, is lost, or cannot be had in that
        layout; what the start of a read raises.
        """
        layout = returned(entry.seen, wanted, relies_on, lambda: entry.name)
        if entry.counter is not None and entry.counter._version != entry.version:
            raise errors.changed_in_place(entry, entry.counter._version)
        state = entry.state
        if state is State.ON_DISK:
            return self._read(entry, layout, seq)
        if state is State.LOST:
            raise errors.lost(entry)
        if state is State.EMPTY:
            size, stride, dtype = layout
            out = torch.empty_strided(size, stride, dtype=dtype, device=entry.device)
            return Load(out, out, None, seq)
        if state.where != "memory":
            raise errors.donated(entry)
        load = self._from_memory(entry, layout, seq, consume, relies_on)
        self._ledger.turn(entry, load, "asked")
        return load

    def find(self, entry: Entry, x: Tensor) -> Load:
        """The load that returned `x`. Needs no lock.

        Raises: RuntimeError if there is none that was not waited for.
        """
        address = x.data_ptr()
        for load in list(entry.loads):  # another thread may take its own out
            if load.out.data_ptr() == address:
                return load
        raise errors.not_loaded(entry)

    def ahead(self, entry: Entry) -> None:
        """Starts a prefetch, which `begin` will find."""
        landing = self._landing(entry)
        read = self._transfer(entry, landing)
        load = Load(landing, landing, read, AHEAD, stream=streams.current(entry.device))
        try:
            self._ledger.turn(entry, load, "ahead")
            counters(entry.graph).prefetched_bytes += entry.moved_bytes
            read.start()
        except BaseException:  # the load that takes it over would wait for ever for a read that never started
            self.drop_ahead(entry)
            raise

    def drop_ahead(self, entry: Entry) -> None:
        """Ends the prefetch of an entry, if it has one. Called again if a signal ended it early."""
        if entry.ahead:
            self._end(entry, entry.ahead)

    def forget(self, entry: Entry) -> None:
        """Ends all reads of an entry that dies."""
        self.drop_ahead(entry)
        for load in list(entry.loads):
            self._end(entry, load)

    def _end(self, entry: Entry, load: Load) -> None:
        """Ends a read that nobody wants any more, and only then forgets it, because the load holds the memory it fills.

        That memory goes back in the order of the stream that asked: it waits for a copy, so that the host need not.
        """
        if load.read and not (isinstance(load.read, Queued) and load.read.abandon()):
            load.read.cancel()
        self._ledger.turn(entry, load, "over")

    def follow(self, entry: Entry, load: Load) -> bool:
        """Lets the device's stream wait for a load's read. Returns whether it does: then the host need not.

        False for a read whose outcome the host has to see. Takes the lock itself.
        """
        if not isinstance(load.read, Queued) or not load.read.cannot_fail():
            return False
        stall = Stall.sampled(entry.device) if entry.timed else None
        load.read.follow()
        if stall:
            stall.end()
            self.stalls.append((stall, entry.graph, entry.slot, load.strict))
        self._arrived(entry, load)
        return True

    def complete(self, entry: Entry, load: Load) -> OSError | None:
        """Waits for a load's read, and reads again after an error. Returns the last error; None if the bytes are there.

        Takes the lock itself.
        """
        assert load.read, "only asked for loads that read"
        error = outcome(load.read)
        attempts = 1
        while error and attempts < ATTEMPTS:
            error = self._read_again(entry, load)
            attempts += 1
        span, how = load.read.span(), "failed" if error else "ok"
        trace.transfer("read", entry.graph, entry.slot, load.seq, span, entry.moved_bytes, how, self._engine.name)
        if error is None:
            self._arrived(entry, load)
        return error

    def waits(self) -> Iterator[tuple[str, int, bool, float, int]]:
        """The waits of devices that were not returned before: graph, slot, whether the plan has no memory to read the
        tensor earlier, seconds, and the number of waits that this one stands for."""
        while self.stalls:
            stall, graph, slot, strict = self.stalls[0]
            seconds = stall.seconds()
            if seconds is None:
                return
            self.stalls.popleft()
            yield graph, slot, strict, seconds, stall.stands_for

    def _read_again(self, entry: Entry, load: Load) -> OSError | None:
        """The error of another attempt, None if the bytes are there. Waits for its end."""
        try:
            with GUARD.lock:
                load.read = self._transfer(entry, load.landing)
                load.read.start()
        except OSError as error:
            return error
        return outcome(load.read)

    def _arrived(self, entry: Entry, load: Load) -> None:
        """Counts what was read, and makes the loaded tensor of it."""
        with GUARD.lock:
            counters(entry.graph).read_bytes += entry.moved_bytes
        if entry.encoded or not load.same:
            _place(entry, load)

    def _from_memory(self, entry: Entry, layout: TensorMeta, seq: int, consume: bool, relies_on: str) -> Load:
        """The load from memory: the stored tensor is donated if the backward may consume it and nobody else has it.

        Otherwise it is copied. The backward may overwrite what it is donated.
        """
        held = entry.held
        same = layout == entry.seen
        assert held is not None, "in memory"
        if entry.encoded:
            load = Load(self._new(entry, layout), held, None, seq, same)
            with streams.in_turn_with(entry.stream, entry.device):
                _place(entry, load)
            return load
        if consume and same and _may_begin_there(held, relies_on) and is_alone(held) and not is_foreign(held):
            out = alias(held, layout)  # before `give_away`, which drops `held` if the write has ended meanwhile
            self._writer.give_away(entry)
            if entry.state is State.KEPT:  # else its write had ended
                self._ledger.move(entry, State.DONATED)
            entry.storage = None  # it lives on in the backward, so it cannot show whether the write freed memory
            return Load(out, out, None, seq)
        out = self._new(entry, layout)
        if same:
            tensors.copy_bytes(alias(out, entry.layout), held)
        else:
            tensors.copy_elements(out, alias(held, entry.seen))
        return Load(out, out, None, seq)

    def _read(self, entry: Entry, layout: TensorMeta, seq: int) -> Load:
        if entry.ahead and entry.ahead.stream != streams.current(entry.device):
            self.drop_ahead(entry)  # its memory is of the stream that asked, which may reuse it before ours has read it
        ahead = entry.ahead
        same = layout == entry.seen
        landing = ahead.landing if ahead else self._landing(entry)
        if entry.encoded or not same:
            out = self._new(entry, layout)
        else:
            out = landing if layout == entry.layout else alias(landing, layout)
        if ahead:
            ahead.out, ahead.seq, ahead.same = out, seq, same
            self._ledger.turn(entry, ahead, "asked")
            return ahead
        read = self._transfer(entry, landing)
        load = Load(out, landing, read, seq, same)
        self._ledger.turn(entry, load, "asked")
        read.start()
        return load

    def _transfer(self, entry: Entry, landing: Tensor) -> Completion:
        if entry.state is State.LOST:
            raise errors.lost(entry)
        assert entry.extent, "on disk"
        return self._engine.read(entry.extent, Memory.of(landing))

    def _new(self, entry: Entry, layout: TensorMeta) -> Tensor:
        """A new tensor of `layout`, at storage offset 0."""
        if layout != entry.seen:
            return tensors.empty(layout, entry.device)
        stored = tensors.empty(entry.layout, entry.device)
        return stored if layout == entry.layout else alias(stored, layout)

    def _landing(self, entry: Entry) -> Tensor:
        """The tensor that a read fills."""
        if entry.encoded:
            return tensors.empty(TensorMeta((entry.encoded.nbytes,), (1,), torch.uint8), entry.device)
        return tensors.empty(entry.layout, entry.device)


def _may_begin_there(held: Tensor, relies_on: str) -> bool:
    """Whether the backward can read the tensor where it is in its storage.

    `as_strided` counts from the start of the storage; only code of Inductor counts from the tensor's address.
    Inductor's kernels for a device read 16 bytes at a time. Inductor checks the alignment of the storage offset, and
    not that of the address.
    """
    if relies_on != "address":
        return held.storage_offset() == 0
    if held.device.type == "cpu":
        return True
    offset_bytes = held.storage_offset() * held.itemsize
    return held.data_ptr() % ALIGNMENT == 0 and offset_bytes % ALIGNMENT == 0


def _place(entry: Entry, load: Load) -> None:
    """Fills `out` from `landing`, where the bytes have arrived, if the two differ."""
    stored = load.landing
    if entry.encoded:
        stored = alias(load.out, entry.layout) if load.same else tensors.empty(entry.layout, entry.device)
        entry.encoded.decode(load.landing, stored)
    if not load.same:
        tensors.copy_elements(load.out, alias(stored, entry.seen))
