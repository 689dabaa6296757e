"""The store: what the ops do with an entry. `docs/runtime.md` has the picture."""

import atexit
import math
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from ssd_fx.runtime import entries, errors, stats, trace
from ssd_fx.runtime.account import Account
from ssd_fx.runtime.config import TIERS, RuntimeConfig, parse
from ssd_fx.runtime.deaths import before_work, janitor, when_idle
from ssd_fx.runtime.device import clock, device_trace, driver, streams
from ssd_fx.runtime.device.arrival import Arrival
from ssd_fx.runtime.engines import base, registry
from ssd_fx.runtime.engines.base import outcome
from ssd_fx.runtime.entries import GUARD, Entry, Load, State
from ssd_fx.runtime.habits import Habits
from ssd_fx.runtime.layout import TensorMeta, dense_form, is_alone, is_parameter
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.memory.available import available_bytes
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.prefetch import Prefetcher
from ssd_fx.runtime.reader import ATTEMPTS, Reader
from ssd_fx.runtime.residency import Residency
from ssd_fx.runtime.stats import counters
from ssd_fx.runtime.writer import Writer

now = time.perf_counter


class Store:
    """Stores and loads the tensors of all graphs with one configuration, through one engine."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.engine, resident_bytes = registry.make_tiers(config, stats.moved)
        most = config.resident_at_most if config.adapt else 0
        self.residency = Residency(resident_bytes, most, self._available_bytes, waits=config.slowdown)
        self._ranks = config.ranks
        self.device = torch.device("cpu")  # of the tensor that was stored last
        self.habits = Habits(config.adapt)
        self.writer = Writer(self.engine, config, self.habits, self.residency)
        self.reader = Reader(self.engine, self.writer)
        self.account = self._account(config) if config.memory else None
        window = 0 if config.memory else config.prefetch
        self.prefetcher = Prefetcher(self.reader, self.habits, window, self._spare)
        self.when_left: Callable[[], None] | None = None  # called under the lock after the death of an entry

    def begin(self, graph: str, saved_bytes: int, device: torch.device) -> None:
        """A forward of `graph` begins on `device`, and will save so many bytes."""
        GUARD.drain()
        with GUARD.lock:
            _begin_later()
            self._learn()
            self.residency.forward_begins()
            self.prefetcher.begin(graph)
            if self.account:
                self.account.begins(graph, saved_bytes, device)
                if seen := self.account.seen:
                    stats.limited(seen.limit, seen.peak, seen.stayed)
        if self.account:  # what has to go for this forward
            stall = self.writer.make_room(device)
            with GUARD.lock:
                counters(graph).stall_s += stall
                self.account.settled()

    def store(
        self,
        x: Tensor,
        handle: Tensor,
        graph: str,
        slot: int,
        seq: int,
        tier: str = "",
        binding: bool = False,
        later: bool = False,
    ) -> None:
        """Takes `x` over, and makes `handle` its handle.

        `x` is written, or is resident while the budget has room. A `binding` store is never resident, and one that is
        for `later` is resident until the next forward begins. If the write fails `x` stays in memory.

        Raises: ValueError for an unknown tier.
        """
        started = now()
        if tier and tier not in TIERS:
            raise ValueError(
                f"a store of slot {slot} of graph {graph!r} names tier {tier!r}; right would be one of {TIERS}"
            )
        GUARD.drain()
        self._look()
        base.check_device(self.engine, x.device)
        streams.finish_copies_into(x)
        seen = TensorMeta(tuple(x.shape), x.stride(), x.dtype)
        layout = dense_form(x)
        self.device = x.device
        nbytes = math.prod(layout.size) * x.itemsize
        entry = Entry(self, graph, slot, seq, nbytes, x.data_ptr(), layout, seen, x.device, tier, binding, later)
        entries.register(entry, handle)  # before `accept`: if that raises, the handle's death releases the entry
        stall = self.writer.accept(entry, x) if nbytes else 0.0
        with GUARD.lock:
            for other in list(_stores.values()):  # what found no room in flight when this forward began
                if other is not self:
                    other.writer.go_on()
            self.prefetcher.stored(entry)
            c = counters(graph)
            c.stores += 1
            c.waited("write", slot, stall)
            self.residency.stored(nbytes, self.writer.resident_bytes)
            self.residency.waited(stall)
            c.forward_node(seq)
            self._record("store", entry, seq, started, "disk" if entry.extent else entry.state.value, stall)

    def wait_store_(self, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, block: bool = False) -> None:
        """The release: the graph reads `keepalive`, the stored tensor, no more.

        Where a write is waited for, a copy of a device is waited for by the tensor's stream, and not by the host.

        `hand_over`: the caller drops its reference and writes nothing into the memory, so we may hold the tensor.
        Otherwise a write is waited for, and what is still in memory then moves to memory of ours. A leaf that requires
        grad does not move: it is its owner's, who may change it through `.data`.
        `block`: the plan needs the memory, so a write is waited for in any case.

        A move that waits for no write comes at once. Else it comes when the write has ended, if it failed.

        Raises: RuntimeError if `keepalive` is not the memory that was stored.
        """
        started = now()
        self._look()
        if keepalive.data_ptr() != entry.ptr:
            raise errors.another_buffer(entry)
        moves = not hand_over and not is_parameter(keepalive)
        with GUARD.lock:
            self.writer.reap()
            write = entry.write if block or not hand_over else None
            if write is not None and self.writer.follow(entry):
                write = None
            if moves and write is None:  # under this lock: a store in another thread may begin to write the entry
                _put_aside(entry)
        arrival = Arrival(entry.device) if write else None
        error = outcome(write) if write else None
        stall = arrival.waited_s() if arrival else 0.0
        with GUARD.lock:
            if write and entry.write is write:
                self.writer.finish(entry, error)
            if moves:
                _put_aside(entry)  # what could not be written
            self.writer.release(entry)
        if self.account:
            stall += self.writer.make_room(entry.device)
        with GUARD.lock:
            c = counters(entry.graph)
            c.waited("write", entry.slot, stall)
            self.residency.waited(stall)
            c.forward_node(seq)
            self._record("release", entry, seq, started, entry.state.value, stall)

    def load(
        self,
        entry: Entry,
        wanted: TensorMeta,
        seq: int,
        *,
        consume: bool,
        strict: bool = False,
        relies_on: str = "dtype",
    ) -> Tensor:
        """The tensor, whose bytes are undefined until `wait_load_` returned.

        It has the layout `wanted` in the parts that the reader `relies_on` (`layout.RELIES_ON`).
        `consume`: no later backward and no caller needs it, so the stored tensor may be donated. `strict`: the plan
        has no memory to read it earlier, so we do not learn to, however long the graph waits.

        Raises: what `Reader.begin` raises.
        """
        started = now()
        self._look()
        with GUARD.lock:
            self.writer.reap()
            self._learn()
            where = entry.state
            entry.strict = strict
            entry.asked = True
            self.habits.asked(entry.graph)
            self._judge(entry)
            load = self.reader.begin(entry, wanted, seq, consume=consume, relies_on=relies_on)
            self.residency.loads(self.writer.resident_bytes)
            if self.account:
                self.account.turns()
            self.prefetcher.asked(entry)
            self.writer.count_out(entry)
            c = counters(entry.graph)
            c.loads += 1
            if where is State.IN_MEMORY:
                c.forwarded_bytes += entry.nbytes
            c.backward(seq)
            self._record("load", entry, seq, started, where.value)
        return load.out

    def wait_load_(self, entry: Entry, x: Tensor, seq: int) -> None:
        """Returns when the bytes of `x`, a result of `load`, are there for all that the graph does next.

        Raises: OSError if they cannot be had; RuntimeError if no load of this entry returned `x`.
        """
        started = now()
        self._look()
        load = _find(entry, x) if entry.nbytes else None
        if load and load.read:
            self._wait_for_read(entry, load, seq, started)
            return
        with GUARD.lock:
            if load:
                self.reader.done(entry, load)
                self.prefetcher.advance()
            counters(entry.graph).backward(seq)
            self._record("wait", entry, seq, started, "memory")

    def _wait_for_read(self, entry: Entry, load: Load, seq: int, started: float) -> None:
        """`wait_load_` of a load that reads. Raises: as `wait_load_`."""
        followed = isinstance(load.read, streams.Queued) and load.read.cannot_fail()  # the host waits for nothing
        arrival = None if followed else Arrival(entry.device)
        error = self.reader.complete(entry, load)
        stall = arrival.waited_s() if arrival else 0.0
        with GUARD.lock:
            self.reader.done(entry, load)
            self.residency.waited(stall)
            if not entry.strict and not followed:
                self.habits.waited(entry.graph, entry.slot, stall)
            self.prefetcher.advance()
            c = counters(entry.graph)
            c.waited("read", entry.slot, stall)
            c.backward(seq)
            self._record("wait", entry, seq, started, "disk", stall)
        if error:
            raise errors.not_read(entry, ATTEMPTS, error) from error

    def release(self, entry: Entry) -> None:
        """Ends the I/O of an entry whose handle is dead, and gives extent and memory back.

        Called under the lock, and once more if a signal ended the first call early.
        """
        if entry.extent is not None and not entry.asked:
            self.habits.died_unread(entry.graph, entry.slot)
        self.prefetcher.dead(entry)
        self.reader.forget(entry)
        if isinstance(entry.write, streams.Queued) and entry.held is not None and not is_alone(entry.held):
            self._freed(entry, False)  # nor would it be at the end of the copy
        self.writer.give_away(entry)
        self.writer.in_vain.let_go()  # no op of ours comes behind the last load of a backward
        self.writer.count_out(entry)
        self._judge(entry)
        entry.held = None
        extent, entry.extent = entry.extent, None
        if extent:
            self.engine.free(extent)

    def end(self) -> None:
        """Ends the use of the engine: what is in memory stays there, and what is not is lost.

        A read that somebody waits for may still end well. Called under the lock. Then `close` is called.
        """
        self.writer.end()
        for entry in entries.of(self):
            self.prefetcher.dead(entry)
            self.reader.drop_ahead(entry)
            entry.lost = entry.held is None and entry.extent is not None

    def close(self) -> None:
        """Returns when all transfers have ended. Called once, behind `end`; without the lock other graphs go on."""
        try:
            self.engine.close()
        finally:
            self.writer.in_vain.end()

    def _account(self, config: RuntimeConfig) -> Account:
        self.writer.limited = True
        return Account(config.memory, config.ranks, self._held_bytes, self._outstanding_bytes, self.residency.allow)

    def _held_bytes(self) -> int:
        """What the runtime alone holds: for the backward, or read ahead of it."""
        return self.writer.held_bytes + self.reader.ahead_bytes

    def _outstanding_bytes(self) -> int:
        return self.writer.outstanding_bytes

    def _look(self) -> None:
        """A node of ours begins."""
        if self.account:
            with GUARD.lock:
                self.account.look()

    def _available_bytes(self) -> int:
        """This rank's share of the free memory; none on a GPU, where steps need what looks free between them."""
        return available_bytes() // self._ranks if self.device.type == "cpu" else 0

    def _spare(self) -> int:
        """The bytes that may be read ahead, because tensors that were resident have left them."""
        if self.account:  # what the graph has asked for is the graph's, not read ahead
            asked = self.reader.outstanding_bytes - self.reader.ahead_bytes
            return max(0, self.residency.nbytes - self.writer.held_bytes) + asked
        return self.residency.spare(self.writer.resident_bytes)

    def _learn(self) -> None:
        """Counts what a device has waited for meanwhile."""
        for graph, slot, strict, seconds, of in self.reader.stalls():
            counters(graph).waited("read", slot, seconds * of)
            if not strict:
                self.habits.waited(graph, slot, seconds)

    def _judge(self, entry: Entry) -> None:
        """Learns, once per entry, whether writing it freed memory, or would have freed memory if it was not written."""
        if entry.held is None and entry.extent and entry.storage:
            self._freed(entry, entry.storage.expired())
        elif entry.held is not None and self.habits.of(entry.graph, entry.slot).keep:
            self.habits.kept(entry.graph, entry.slot, is_alone(entry.held))

    def _freed(self, entry: Entry, freed: bool) -> None:
        if entry.storage:
            entry.storage = None
            counters(entry.graph).count("freed" if freed else "wasted", entry.slot, entry.nbytes)
            self.habits.freed(entry.graph, entry.slot, entry.nbytes, freed)

    def _record(self, kind: str, entry: Entry, seq: int, started: float, where: str, waited: float = 0.0) -> None:
        if self.account:
            self.account.settled()
        event = (kind, entry.graph, entry.slot, seq, started, now(), entry.nbytes, where, self.engine.name)
        trace.record(trace.Event(*event, CPU_ALLOCATOR.live_bytes, waited))


def begin_later() -> None:
    """A forward begins that stores nothing. In the capture of a CUDA graph nothing may be written."""
    if any(streams.is_captured(store.device) for store in list(_stores.values())):
        return
    GUARD.drain()
    with GUARD.lock:
        _begin_later()


def _begin_later() -> None:
    """Of all options: their backwards come later, too."""
    for store in list(_stores.values()):
        store.writer.forward_begins()


def _find(entry: Entry, x: Tensor) -> Load:
    address = x.data_ptr()
    for load in list(entry.loads):  # without the lock: another thread may take its own out
        if load.out.data_ptr() == address:
            return load
    raise errors.not_loaded(entry)


def _put_aside(entry: Entry) -> None:
    """Moves what is still in the caller's memory to memory of ours: the caller may overwrite its own from here on.

    So its version says nothing about the stored tensor any more, and is not compared.
    """
    if entry.held is not None and entry.borrowed:
        aside = tensors.empty(entry.layout, entry.device)
        tensors.copy_bytes(aside, entry.held)
        entry.held = aside
        entry.borrowed = False
    entry.counter = None


_stores: dict[RuntimeConfig, Store] = {}


def get_store(config: str) -> Store:
    """The store of a configuration, made at the first use.

    Raises: ValueError for a bad configuration; OSError if its directories cannot be used.
    """
    parsed = parse(config)
    found = _stores.get(parsed)
    if found is None:
        with GUARD.lock:
            found = _stores.get(parsed) or _stores.setdefault(parsed, Store(parsed))
        janitor()  # this thread follows up the death of the store's last graph
    return found


def end_unused(config: RuntimeConfig, when_left: Callable[[], None]) -> None:
    """Ends the store of a configuration that no graph uses any more.

    A store that has entries does not end, because a backward may come. It then calls `when_left` under the lock after
    the death of each entry.
    """
    GUARD.drain()
    with GUARD.lock:
        store = _stores.get(config)
        if store is None:
            return
        if entries.of(store):
            store.when_left = when_left
            return
        del _stores[config]  # first, as in `_end`
        try:
            store.end()
        except BaseException:
            store.close()
            raise
    store.close()  # without the lock
    if not _stores:
        CPU_ALLOCATOR.trim()


def close_stores() -> None:
    """Ends the I/O, threads and files of all stores. What is in memory can still be loaded, and nothing else."""
    GUARD.drain()
    with GUARD.lock, ExitStack() as ending:  # if one fails, or a Ctrl-C comes, the others end too
        for config in _stores:
            ending.callback(_end, config)
    CPU_ALLOCATOR.trim()


def _end(config: RuntimeConfig) -> None:
    store = _stores.pop(config)  # first: whatever interrupts the end, no later step finds a store that writes nothing
    try:
        store.end()
    finally:
        store.close()


_inherited: list[object] = []
"""In the child of a fork: what has events of a device. The destructor of a CUDA event would end the child, which cannot
use CUDA."""


def _after_fork() -> None:
    stores = list(_stores.values())
    held = entries.after_fork()
    events = [*clock.forget(), *device_trace.clear()]
    if events or any(streams.of(store.device) for store in stores):
        _inherited.extend((stores, held, events))
    _stores.clear()
    registry.forget_engines()


def _at_exit() -> None:
    entries.close()
    try:
        close_stores()
    finally:
        entries.forget()


def _let_go() -> None:
    """For a process that trains no more, or only evaluates: no op comes that would drop what was given away."""
    with GUARD.lock:
        for store in list(_stores.values()):
            store.writer.in_vain.let_go()


when_idle += [CPU_ALLOCATOR.tick, _let_go]
before_work += [driver.capture_apart]
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
