"""Tensors on their way out of memory.

    accept -> resting -> writing -> on disk        a tensor is held by a reference of ours until it is written
       |         `-- while there is room in memory they stay, and the oldest one leaves first
       `-> held for good: leaves, and what experience says is held by others anyway

All methods but `accept` run under the lock of `entries`.
"""

from __future__ import annotations

import errno
import time
from collections import OrderedDict

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime import codec, trace
from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.engines.base import Engine, Memory, outcome
from ssd_fx.runtime.entries import GUARD, Entry
from ssd_fx.runtime.habits import Habits
from ssd_fx.runtime.layout import alias, let_go, versioned_alias
from ssd_fx.runtime.stats import counters

OVERTAKERS = 8  # writes end about in the order in which they began: so many unfinished ones are looked past

now = time.perf_counter


class Writer:
    """Decides when a tensor is written, and keeps it until that is done."""

    def __init__(self, engine: Engine, config: RuntimeConfig, habits: Habits, room: int) -> None:
        """`room`: bytes that may rest."""
        self._engine, self._habits = engine, habits
        self._cap, self._room, self._codec = config.inflight, room, config.codec("ssd")
        self._host_codec = config.codec("host")
        self._resting: OrderedDict[Entry, None] = OrderedDict()  # oldest first, before them those that may not rest
        self._writing: dict[Entry, None] = {}  # oldest first
        self.resting_bytes = self.writing_bytes = 0
        self._live = _Tide()
        self._ended = False

    def accept(self, entry: Entry, x: Tensor) -> float:
        """Takes a tensor over, and starts what must be written now; seconds waited for the cap on bytes in flight."""
        started, accepted, stalled = now(), False, False
        while True:
            with GUARD.lock:
                self.reap()
                if not accepted:
                    self._hold(entry, x)
                    accepted = True
                self._start_due()
                if not self._due():
                    return now() - started if stalled else 0.0
                oldest = next(iter(self._writing)).write
            stalled = True
            if oldest:
                outcome(oldest)  # whatever it is, reap deals with it

    def reap(self) -> None:
        """Drops the references to what has been written: from here on only others keep that memory."""
        unfinished, ended = 0, []
        for entry in self._writing:
            if entry.write is not None and entry.write.done():
                ended.append((entry, entry.write))
            elif (unfinished := unfinished + 1) > OVERTAKERS:
                break
        for entry, write in ended:
            self.finish(entry, outcome(write))

    def finish(self, entry: Entry, error: OSError | None) -> None:
        """A write has ended: the bytes are on disk, or the tensor stays."""
        c = counters(entry.graph)
        self._forget_write(entry, "failed" if error else "ok")
        if error is None:
            c.written_bytes += entry.moved_bytes
            drop(entry)
            return
        c.kept_bytes += entry.nbytes
        extent, entry.extent = entry.extent, None
        assert extent, "a write has an extent"
        self._engine.free(extent)
        if error.errno != errno.ECANCELED:
            self._engine.failed(extent, error)

    def cancel(self, entry: Entry) -> None:
        """Afterwards nothing reads the tensor's memory; an extent stays only if all of it had been written."""
        if entry in self._resting:
            self._leave_rest(entry)
        if entry not in self._writing:
            return
        if entry.write and not entry.write.cancel():
            self.finish(entry, None)
            return
        self._cut_short(entry)

    def end(self) -> None:
        """Ends all writes for good. What was being written stays in memory, whatever had been written of it."""
        self._ended = True
        for entry in list(self._writing):
            if entry.write:
                entry.write.cancel()
            self._cut_short(entry)

    def wanted(self, entry: Entry) -> None:
        """The entry is asked for, or dies: it counts no more among what a step has outstanding."""
        self._live.fall(entry)

    def _hold(self, entry: Entry, x: Tensor) -> None:
        entry.held = counter = versioned_alias(x)
        if entry.layout != entry.seen:  # a view of the alias would keep the storage for as long as the counter lives
            entry.held = alias(x, entry.layout)
            let_go(counter)
        entry.borrowed = True
        if not x.is_inference():
            entry.counter, entry.version = counter, x._version
        entry.storage = StorageWeakRef(x.untyped_storage())
        if (x.requires_grad and x.is_leaf) or self._habits.of(entry.graph, entry.slot).keep:
            entry.storage = None
            counters(entry.graph).held_bytes += entry.nbytes
            return
        entry.early = entry.binding or self._live.rise(entry) > self._room
        if self._room and self._host_codec and not entry.early:
            self._encode(entry, self._host_codec)
        nbytes = entry.moved_bytes
        self._resting[entry] = None
        self.resting_bytes += nbytes
        if entry.binding:
            self._resting.move_to_end(entry, last=False)

    def _due(self) -> Entry | None:
        """The entry that should be written next: the first, if it may not rest, or more do than may or are to come."""
        oldest = None if self._ended else next(iter(self._resting), None)
        return oldest if oldest and (oldest.early or self.resting_bytes > self._room) else None

    def _start_due(self) -> None:
        while entry := self._due():
            if self._writing and self.writing_bytes + entry.moved_bytes > self._cap:
                return
            self._start(entry)

    def _start(self, entry: Entry) -> None:
        self._leave_rest(entry)
        # The plan's tier, wherever there is room: what a lossy codec leaves of a tensor must not depend on timing.
        encoding = self._host_codec if entry.tier == "host" else self._codec
        if encoding and not entry.encoded:
            self._encode(entry, encoding)
        held, nbytes = entry.held, entry.moved_bytes
        assert held is not None, "what rests is held"
        try:
            extent = self._engine.alloc(nbytes, entry.tier)
        except OSError:  # the engine warned; the tensor stays in memory
            counters(entry.graph).kept_bytes += entry.nbytes
            return
        entry.extent = extent
        self._writing[entry] = None  # from the extent to the sum no call, in which a signal might end it
        self.writing_bytes += nbytes
        try:
            entry.write = self._engine.write(extent, Memory.of(held))
            entry.write.start()
        except OSError as error:
            self.finish(entry, error)
        except BaseException:  # Ctrl-C, no memory: nothing may stay among the writes that nobody will ever end
            self.cancel(entry)
            raise

    def _cut_short(self, entry: Entry) -> None:
        self._forget_write(entry, "cancelled")
        counters(entry.graph).cancelled_bytes += entry.nbytes
        extent, entry.extent = entry.extent, None
        assert extent, "a write has an extent"
        self._engine.free(extent)

    def _leave_rest(self, entry: Entry) -> None:
        nbytes = entry.moved_bytes
        del self._resting[entry]
        self.resting_bytes -= nbytes

    def _forget_write(self, entry: Entry, how: str) -> None:
        nbytes = entry.moved_bytes
        del self._writing[entry]
        self.writing_bytes -= nbytes
        write, entry.write = entry.write, None
        if write:
            engine = self._engine.name
            trace.transfer("write", entry.graph, entry.slot, entry.seq, write.span(), nbytes, how, engine)

    def _encode(self, entry: Entry, name: str) -> None:
        habit = self._habits.of(entry.graph, entry.slot)
        if name in habit.plain:
            return
        x = entry.held
        assert x is not None, "what rests is held"
        if entry.layout != entry.seen and codec.is_lossy(name, x.dtype):
            return  # what lies in the gaps would count
        made = codec.encode(name, x)
        if made is None:
            if not codec.is_lossy(name, x.dtype):  # else it was an infinity, which comes and goes
                habit.plain.add(name)
            return
        payload, encoded = made
        c = counters(entry.graph)
        c.encoded_from_bytes += entry.nbytes
        c.encoded_to_bytes += encoded.nbytes
        if encoded.lossy and habit.error is None:
            decoded = x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())
            encoded.decode(payload, decoded)
            habit.error = codec.relative_error(x, decoded)
        c.encoding_error = max(c.encoding_error, habit.error or 0.0)
        drop(entry)
        entry.held, entry.encoded, entry.borrowed = payload, encoded, False


class _Tide:
    """Bytes of the entries that are stored and not asked for yet; what the last step reached foretells the next.

    A step ends where they have fallen to half of their height or less and rise again. Not where none is left: a caller
    may keep a graph for ever.
    """

    def __init__(self) -> None:
        self._now = self._peak = self._forecast = 0
        self._falling = False
        self._counted: set[Entry] = set()

    def rise(self, entry: Entry) -> int:
        """Counts an entry; the bytes that are expected to come on top of it: by that much memory will be short."""
        if self._falling and 2 * self._now <= self._peak:
            self._forecast, self._peak = self._peak, self._now
        self._falling = False
        self._counted.add(entry)
        before, self._now = self._now, self._now + entry.nbytes
        self._peak = max(self._peak, self._now)
        return self._forecast - before

    def fall(self, entry: Entry) -> None:
        """Takes an entry out."""
        if entry in self._counted:
            self._counted.remove(entry)
            self._now -= entry.nbytes
            self._falling = True


def drop(entry: Entry) -> None:
    """Our reference to the stored bytes goes; what tells whether somebody wrote into the tensor stays."""
    held, entry.held = entry.held, None
    if held is not None and held is entry.counter:
        let_go(held)
