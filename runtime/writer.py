"""Tensors on their way out of memory: when each one is written.

    accept -> resident -> writing -> on disk
       |         `-- while the budget has room; the oldest is written first
       |             `later` ones: until the next forward begins, and then while the budget has room
       `-> kept: leaves that require grad, slots whose tensors somebody else holds (`habits`), and what a
                 checkpoint around the graph drops when it ends, or has just computed again

`accept`, `make_room`, `go_on` and `_encode` are called without the lock of `entries`. All other methods run under it.
"""

from __future__ import annotations

import errno
import warnings
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.compat import is_within_checkpoint
from ssd_fx.options import Options
from ssd_fx.runtime import codec, trace
from ssd_fx.runtime.adapt.habits import Habits
from ssd_fx.runtime.adapt.residency import Peak, Residency
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.arrival import Arrival
from ssd_fx.runtime.encoder import Encoder
from ssd_fx.runtime.engines.base import NOT_OF_THE_DRIVE, Completion, Engine, Memory, cut_short, outcome
from ssd_fx.runtime.entries import GUARD
from ssd_fx.runtime.inflight import CopiesInVain, inflight_bytes
from ssd_fx.runtime.layout import alias, drop_storage, is_parameter, versioned_alias
from ssd_fx.runtime.states import Entry, Ledger, Place, State
from ssd_fx.runtime.stats import counters

OVERTAKERS = 8  # writes end about in the order in which they began, so `reap` stops behind this many unfinished ones


class Writer:
    """Decides when a tensor is written."""

    def __init__(
        self,
        engine: Engine,
        ledger: Ledger,
        config: Options,
        habits: Habits,
        residency: Residency,
        peak: Peak,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._habits = habits
        self._residency = residency
        self._peak = peak
        self._encoder = Encoder(config, habits)
        self._inflight = config.inflight_bytes
        self.planned: dict[torch.device, int] = {}  # by device, bytes that plans have on their way at a time
        self._caps: dict[torch.device, int] = {}  # each is asked for once, by a call of the device's library
        self.in_vain = CopiesInVain()
        self._followed: deque[tuple[streams.Queued, str, int, int, int]] = deque()  # untraced copies, oldest first
        self._said_no_memory = False
        self._ended = False
        self.limit: Callable[[int], int] | None = None  # from outstanding bytes to the most that may be held

    def accept(self, entry: Entry, x: Tensor) -> float:
        """Takes the tensor over, and starts every write that is due.

        Returns the seconds waited because too many bytes were being written already.
        """
        with GUARD.lock:
            codec_first = self._hold(entry, x)
            if not self._encoder.codecs:
                self.reap()
                if self._start_due(here=entry.stream) is None:
                    return 0.0
        if codec_first:
            self._encode(entry, codec_first, State.RESIDENT)
        return self.make_room(x.device)

    def make_room(self, device: torch.device) -> float:
        """Starts every write that is due, and waits for room in flight, or until no more is held than may be held.

        Returns the seconds waited. Called without the lock.
        """
        before = self.go_on()
        if before is None:
            return 0.0
        arrival = Arrival(device)
        while before:
            outcome(before)  # an error is left to `reap`
            before = self.go_on()
        return arrival.waited_s()

    def go_on(self) -> Completion | None:
        """Starts the writes that are due, as far as they find room in flight. Returns what holds the next write up.

        Called without the lock. What another thread encodes just now is not waited for.
        """
        while True:
            with GUARD.lock:
                self.reap()
                found = self._start_due()
            if not isinstance(found, Entry):
                return found
            self._encode(found, self._encoder.codec_of(found), State.WRITING)

    def forward_begins(self) -> None:
        """Lets tensors that were stored for `later` be written from now on, because a forward begins."""
        for entry in self._ledger.resident:
            entry.later = False

    def reap(self) -> None:
        """Drops our references to the tensors that have been written.

        It looks no further than an unfinished copy to host memory, which nothing overtakes.
        """
        self.in_vain.let_go()
        while self._followed and self._followed[0][0].done():
            copy, graph, slot, seq, nbytes = self._followed.popleft()
            outcome(copy)  # from here on the span of the copy is known
            trace.transfer("write", graph, slot, seq, copy.span(), nbytes, "ok", self._engine.name)
        unfinished = 0
        ended = []
        for entry in self._ledger.writing:
            write = entry.write
            if write is not None and write.done():
                ended.append((entry, write))
                continue
            unfinished += 1
            if unfinished > OVERTAKERS or (isinstance(write, streams.Queued) and write.cannot_fail()):
                break
        for entry, write in ended:
            self.finish(entry, outcome(write))

    def finish(self, entry: Entry, error: OSError | None) -> None:
        """Records the end of a write: the bytes are on disk, or after an error the tensor stays in memory.

        Hazard: `share_memory_` may give the storage other memory during the write. The write may then have read the old
        memory when it was another tensor's, and the checksum fits these bytes, not the tensor's.
        """
        if error is None and entry.held is not None and entry.held.data_ptr() != entry.address:
            error = OSError(errno.EFAULT, "its storage was given other memory while it was written")
        c = counters(entry.graph)
        if error is None:
            self._end_write(entry, State.ON_DISK, "ok")
            c.written(entry.moved_bytes, on_drive=entry.on_drive)
            return
        c.count("kept", entry.slot, entry.nbytes, str(error))
        try:
            if error.errno not in NOT_OF_THE_DRIVE and entry.extent is not None:
                self._engine.failed(entry.extent, error)  # while the entry has its extent, which knows its drive
        finally:  # the warning of `failed` may be raised as an error
            self._end_write(entry, State.KEPT, "failed")
        if error.errno == errno.ENOMEM and not self._said_no_memory:
            self._said_no_memory = True
            warnings.warn(
                f"ssd_fx keeps activations in memory: storing {entry.name} failed ({error.strerror}); the next is "
                "tried as ever",
                RuntimeWarning,
                stacklevel=2,
            )

    def cancel(self, entry: Entry) -> None:
        """Ends an entry's write, or its wait for one. Afterwards nothing reads the tensor's memory.

        The tensor is on disk only if all bytes had been written.
        """
        if entry.state is State.RESIDENT or entry.state is State.ENCODING:
            self._ledger.move(entry, State.KEPT)
        if entry.state is not State.WRITING:
            return
        error = cut_short(entry.write)
        if error and error.errno == errno.ECANCELED:
            self._cancelled(entry)
        else:
            self.finish(entry, error)

    def release(self, entry: Entry) -> None:
        """Records that the graph needs the tensor no longer: from now on it is held for the backward alone."""
        self._ledger.releases(entry)

    @property
    def held_bytes(self) -> int:
        """The bytes that are held for the backward alone: released by the graph and still in memory, or read ahead."""
        ledger = self._ledger
        return ledger.resident_bytes + ledger.writing_bytes + ledger.ahead_bytes - ledger.in_use_bytes

    @property
    def outstanding_bytes(self) -> int:
        """The bytes that the graph has released and the backward has not asked for, wherever they are."""
        return self._peak.nbytes - self._ledger.unreleased_bytes

    def give_away(self, entry: Entry) -> None:
        """Ends an entry's write, or its wait for one, because nobody will read it. Then its owner may overwrite the
        tensor.

        A copy that is queued on a stream goes on: nothing can take it back, and to see it end the host would wait for
        all copies before it. Nobody reads what it moves. Nobody else gets the memory that the copy reads, and it counts
        as being written, until the copy has ended, or the stream that the memory belongs to waits for the copy.
        Otherwise a host far ahead of its device would give away more and more.
        """
        write, held = entry.write, entry.held
        if isinstance(write, streams.Queued) and write.cannot_fail() and not write.done():
            assert held is not None, "what is being written is held"
            self.in_vain.add(write, held.untyped_storage(), entry.moved_bytes, entry.stream)
            self._cancelled(entry)
            return
        self.cancel(entry)

    def follow(self, entry: Entry) -> bool:
        """Lets the tensor's own stream wait for its write, and drops the tensor. Returns whether it did.

        So the memory goes back in the order of that stream, and the host waits for nothing. False for a write whose
        outcome the host has to see.
        """
        write = entry.write
        if not isinstance(write, streams.Queued) or not write.follow(entry.stream):
            return False
        if write.is_timed:
            self._followed.append((write, entry.graph, entry.slot, entry.seq, entry.moved_bytes))
        self.finish(entry, None)
        return True

    def end(self) -> None:
        """Ends all writes for good. What was being written stays in memory, even if its write had just ended.

        What was copied in vain is held until it has ended (`Store.close`).
        """
        self._ended = True
        for entry in list(self._ledger.writing):
            if entry.state is State.ENCODING:
                self.cancel(entry)
                continue
            if entry.write:
                entry.write.cancel()
            self._cancelled(entry)
        self._followed.clear()

    def count_out(self, entry: Entry) -> None:
        """Counts the entry no longer, neither in the forecast nor as in use: the backward asked for it, or it dies."""
        self._peak.remove(entry)
        self._ledger.releases(entry)

    def _hold(self, entry: Entry, x: Tensor) -> str:
        """Takes a tensor over. Returns the codec that encodes it before it is resident; empty for none."""
        held = counter = versioned_alias(x)
        if entry.layout != entry.seen:
            # not a view of `counter`: that would keep the storage for as long as `counter` lives
            held = alias(x, entry.layout)
            drop_storage(counter)
        entry.stream = streams.current(x.device)
        if not x.is_inference():
            entry.counter = counter
            entry.version = x._version
        why = "a parameter or another leaf that requires a gradient" if is_parameter(x) else ""
        if is_within_checkpoint():
            why = "torch.utils.checkpoint, which drops what is saved and computes it again"
        if why or self._habits.of(entry.graph, entry.slot).keep:
            self._ledger.move(entry, State.KEPT, held)
            counters(entry.graph).count("held", entry.slot, entry.nbytes, why)
            return ""
        entry.storage = StorageWeakRef(x.untyped_storage())
        if entry.binding:  # it goes at once, so it takes no part in the forecast
            entry.early = True
        else:
            to_come = self._peak.add(entry)
            entry.early = to_come > self._residency.nbytes  # not all that is to come can stay, and the oldest go first
        if self.limit:
            self._ledger.uses(entry)
        if self._encoder.codecs:
            self._encoder.stored(entry)
            if codec.is_lossy(self._encoder.codec_of(entry), x.dtype):
                entry.later = False  # what is lost must not depend on other forwards
            stays = "" if entry.early or not self._residency.least else self._encoder.codecs.get("host", "")
            if self._encoder.wants(entry, stays):
                self._ledger.move(entry, State.ENCODING, held)
                return stays
        self._ledger.move(entry, State.RESIDENT, held)
        if entry.binding:
            self._ledger.resident.move_to_end(entry, last=False)
        return ""

    def _encode(self, entry: Entry, name: str, to: Place) -> None:
        """Encodes what an entry holds, without the lock, and then lets it be resident, or starts its write.

        Meanwhile another thread may load the tensor, or its entry may die. If the tensor was in the caller's memory and
        was copied to ours meanwhile (`Store._put_aside`), it is encoded again.
        """
        with GUARD.lock:
            held = entry.held
            if entry.state is not State.ENCODING or held is None:
                return
            mine = alias(held, entry.layout)  # whoever buries the entry takes the storage from `held`
        try:
            with streams.in_turn_with(entry.stream, entry.device):
                made = self._encoder.encode(entry, name, mine)
                with GUARD.lock:
                    if entry.state is not State.ENCODING:
                        return
                    if entry.held is not held:
                        self._ledger.move(entry, State.RESIDENT)
                        self._ledger.resident.move_to_end(entry, last=False)
                        return
                    self._encoder.learn(entry, name, made)
                    if made:
                        self._ledger.move(entry, State.KEPT, made.tensor, made.encoded)
                        entry.stream = streams.current(entry.device)  # the payload's memory is of this thread's stream
                    if to is State.RESIDENT:
                        self._ledger.move(entry, State.RESIDENT)
                    else:
                        self._start(entry)
        except BaseException:  # Ctrl-C or no memory: the tensor stays as it is
            with GUARD.lock:
                if entry.state is State.ENCODING:
                    self._ledger.move(entry, State.KEPT)
            raise
        finally:
            del mine  # now, and not before the end of `in_turn_with`: kernels of the codec may still read it

    def due(self) -> Entry | None:
        """The resident entry that should be written next, or None. An early entry waits for those before it."""
        if self._ended:
            return None
        for entry in self._ledger.resident:  # no generator: when it ends it swallows a Ctrl-C
            if not entry.later:
                return entry if entry.early or self._too_many() else None
        return None

    def _too_many(self) -> bool:
        """Whether more is resident than may be. Under a limit that is so if the resident bytes are more than may stay
        when the graph has released everything, or if what is held now, without what is being written, is too much."""
        ledger = self._ledger
        if not self.limit:
            return ledger.resident_bytes > self._residency.nbytes
        if ledger.resident_bytes > self.limit(self._peak.nbytes):
            return True
        return self.held_bytes - ledger.writing_bytes > self.limit(self.outstanding_bytes)

    def _cap(self, device: torch.device) -> int:
        """The most bytes that are written at a time, if the next tensor is on `device`."""
        found = self._caps.get(device)
        if found is None:
            found = self._caps[device] = self._inflight or inflight_bytes(device)
        return found if self._inflight else max(found, self.planned.get(device, 0))

    def _start_due(self, here: streams.Stream | None = None) -> Completion | Entry | None:
        """Starts the writes that are due. Returns the write that the next one waits for, or the entry to encode next.

        `here`: the stream on which this thread computes, if the caller knows.
        """
        ledger = self._ledger
        while entry := self.due():
            if ledger.writing_bytes + self.in_vain.nbytes + entry.moved_bytes > self._cap(entry.device):
                oldest = self._oldest_under_way()
                if not self.in_vain and self._follow_oldest():
                    continue
                if oldest:  # else the tensor is larger than the cap, and goes alone
                    return oldest
            if self._encoder.codecs and self._encoder.wants(entry, self._encoder.codec_of(entry)):
                ledger.move(entry, State.ENCODING)
                return entry
            if entry.stream is here:
                self._start(entry)
                continue
            with streams.in_turn_with(entry.stream, entry.device):
                self._start(entry)
        while self.limit and self.held_bytes > self.limit(self.outstanding_bytes):
            if not self._follow_oldest():
                return self._oldest_under_way()
        return None

    def _follow_oldest(self) -> bool:
        """Lets a stream wait for the oldest write, as `follow`. Returns whether it does."""
        oldest = self._oldest()
        return oldest is not None and self.follow(oldest)

    def _oldest_under_way(self) -> Completion | None:
        """The write whose end makes room next, None if nothing is under way."""
        oldest = self._oldest()
        return self.in_vain.oldest() or (oldest.write if oldest else None)

    def _oldest(self) -> Entry | None:
        """The entry whose write has been going on for longest; None if there is none."""
        for entry in self._ledger.writing:  # no generator: when it ends it swallows a Ctrl-C
            if entry.write:
                return entry
        return None

    def _start(self, entry: Entry) -> None:
        try:
            self._ledger.move(entry, State.WRITING)
        except OSError as error:  # the engine warned; the tensor stays in memory
            self._ledger.move(entry, State.KEPT)
            counters(entry.graph).count("kept", entry.slot, entry.nbytes, str(error))
            return
        held, extent = entry.held, entry.extent
        assert held is not None, "what is being written is held"
        assert extent, "a write has an extent"
        try:
            memory = Memory.of(held)
            entry.address = memory.ptr
            entry.write = self._engine.write(extent, memory)
            entry.on_drive = extent.on_drive  # now: the bytes may leave host memory before the end of the write is seen
            entry.write.start()
        except OSError as error:
            self.finish(entry, error)
        except BaseException:  # Ctrl-C or no memory: without this the entry would be written for ever
            self.cancel(entry)
            raise

    def _cancelled(self, entry: Entry) -> None:
        self._end_write(entry, State.KEPT, "cancelled")
        counters(entry.graph).cancelled_bytes += entry.nbytes

    def _end_write(self, entry: Entry, to: Place, how: Literal["ok", "failed", "cancelled"]) -> None:
        write = entry.write
        self._ledger.move(entry, to)
        if write and not (self._followed and self._followed[-1][0] is write):
            engine = self._engine.name
            moved = entry.graph, entry.slot, entry.seq, write.span(), entry.moved_bytes
            trace.transfer("write", *moved, how, engine)
