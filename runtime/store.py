"""The store: what the ops do with an entry. `docs/runtime.md` has the picture."""

import atexit
import math
import os
import time
from collections.abc import Callable

from torch import Tensor

from ssd_fx.runtime import entries, trace
from ssd_fx.runtime.config import TIERS, RuntimeConfig, parse
from ssd_fx.runtime.device import clock, device_trace
from ssd_fx.runtime.engines import base, registry
from ssd_fx.runtime.engines.base import outcome
from ssd_fx.runtime.entries import GUARD, Entry, Load, State
from ssd_fx.runtime.guard import janitor
from ssd_fx.runtime.habits import Habits
from ssd_fx.runtime.layout import Layout, dense_form, is_alone
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.memory.buffers import POOL
from ssd_fx.runtime.prefetch import Prefetcher
from ssd_fx.runtime.reader import ATTEMPTS, Reader
from ssd_fx.runtime.stats import counters
from ssd_fx.runtime.writer import Writer

now = time.perf_counter


class Store:
    """The entries of one configuration, over one engine."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.engine, room = registry.make_tiers(config)
        self.habits = Habits(config.adapt)
        self.writer = Writer(self.engine, config, self.habits, room)
        self.reader = Reader(self.engine, self.writer)
        self.prefetcher = Prefetcher(self.reader, self.habits, config.prefetch)
        self.when_left: Callable[[], None] | None = None  # called under the lock when an entry has gone

    def begin(self, graph: str) -> None:
        """A forward of `graph` begins."""
        GUARD.drain()
        with GUARD.lock:
            self.prefetcher.begin(graph)

    def store(
        self, x: Tensor, handle: Tensor, graph: str, slot: int, seq: int, tier: str = "", binding: bool = False
    ) -> None:
        """Starts the write of `x`, or keeps it in memory if that fails or it may rest (not if `binding`).

        `handle` stands for `x` from now on.
        Raises: ValueError for a tier that is none.
        """
        started = now()
        if tier and tier not in TIERS:
            raise ValueError(
                f"a store of slot {slot} of graph {graph!r} names tier {tier!r}; right would be one of {TIERS}"
            )
        GUARD.drain()
        base.check_device(self.engine, x.device)
        seen, layout = Layout(tuple(x.shape), x.stride(), x.dtype), dense_form(x)
        nbytes = math.prod(layout.size) * x.itemsize if x.numel() else 0
        entry = Entry(self, graph, slot, seq, nbytes, x.data_ptr(), layout, seen, x.device, tier, binding)
        entries.register(entry, handle)  # first: whatever happens next, the handle's death releases the entry
        stall = self.writer.accept(entry, x) if nbytes else 0.0
        with GUARD.lock:
            self.prefetcher.stored(entry)
            c = counters(graph)
            c.stores += 1
            c.stall_s += stall
            c.forward(seq)
            self._record("store", entry, seq, started, "disk" if entry.extent else entry.state.value)

    def wait_store_(self, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, block: bool = False) -> None:
        """The release: afterwards the entry does not depend on the caller's buffer.

        `block`: the plan counts on the memory, so a write that is going on is waited for even if the tensor is ours.
        """
        started = now()
        if keepalive.data_ptr() != entry.ptr:
            raise RuntimeError(
                f"the release of {entry.name} was given another buffer than its store, so the stored one was not "
                "protected while it was written; the lowerings of store and wait_store_ must share one buffer"
            )
        with GUARD.lock:
            self.writer.reap()
            write = entry.write if block or not hand_over else None
        error = outcome(write) if write else None
        with GUARD.lock:
            if write and entry.write is write:
                self.writer.finish(entry, error)
            if not hand_over:
                _put_aside(entry)
            c = counters(entry.graph)
            c.stall_s += now() - started if write else 0.0
            c.forward(seq)
            self._record("release", entry, seq, started, entry.state.value)

    def load(
        self, entry: Entry, asked: Layout, seq: int, *, consume: bool, strict: bool = False, relies_on: str = "dtype"
    ) -> Tensor:
        """A tensor of that layout as far as the reader `relies_on` it, valid after `wait_load_`.

        `consume`: nobody asks for it again, so what is still in memory may be given away. `strict`: the plan has no
        memory to read it earlier, whatever it is waited for.
        """
        started = now()
        with GUARD.lock:
            self.writer.reap()
            where = entry.state
            entry.strict = strict
            self._judge(entry)
            load = self.reader.begin(entry, asked, seq, consume=consume, relies_on=relies_on)
            self.reader.start(load)
            self.prefetcher.asked(entry)
            self.writer.count_out(entry)
            c = counters(entry.graph)
            c.loads += 1
            c.forwarded_bytes += entry.nbytes if where is State.IN_MEMORY else 0
            c.backward(seq)
            self._record("load", entry, seq, started, where.value)
        return load.out

    def wait_load_(self, entry: Entry, x: Tensor, seq: int) -> None:
        """Returns when the bytes of `x`, a result of `load`, are there.

        Raises: OSError if they cannot be had; RuntimeError if no load of this entry returned `x`.
        """
        started = now()
        load = _find(entry, x) if entry.nbytes else None
        error = self.reader.complete(entry, load) if load else None
        with GUARD.lock:
            stall = now() - started
            if load:
                self.reader.done(entry, load)
                if load.read and not entry.strict:
                    self.habits.waited(entry.graph, entry.slot, stall)
                self.prefetcher.advance()
            c = counters(entry.graph)
            c.stall_s += stall
            c.backward(seq)
            self._record("wait", entry, seq, started, "disk" if load and load.read else "memory")
        if error:
            message = f"load of {entry.name} failed {ATTEMPTS} times: {error.strerror}"
            raise OSError(error.errno, message, error.filename) from error

    def release(self, entry: Entry) -> None:
        """The handle is dead: ends its I/O, gives extent and memory back. Called under the lock, twice if need be."""
        self.prefetcher.dead(entry)
        self.reader.forget(entry)
        self.writer.cancel(entry)
        self.writer.count_out(entry)
        self._judge(entry)
        entry.held = None
        extent, entry.extent = entry.extent, None
        if extent:
            self.engine.free(extent)

    def end(self) -> None:
        """Nothing goes to the engine from here on: what is in memory stays there, what is not is lost. Called under the
        lock; `close` follows. A read that somebody waits for may still end well.
        """
        self.writer.end()
        for entry in entries.of(self):
            self.prefetcher.dead(entry)
            self.reader.drop_ahead(entry)
            entry.lost = entry.extent is not None

    def close(self) -> None:
        """Joins the threads and closes the files, which may take a second for each GiB of them."""
        self.engine.close()

    def _judge(self, entry: Entry) -> None:
        """Once per entry, when it is wanted: did writing it free memory, and would it have if it was kept?"""
        if entry.held is None and entry.extent and entry.storage:
            freed, entry.storage = entry.storage.expired(), None
            c = counters(entry.graph)
            c.freed_bytes += entry.nbytes if freed else 0
            c.wasted_bytes += 0 if freed else entry.nbytes
            self.habits.freed(entry.graph, entry.slot, entry.nbytes, freed)
        elif entry.held is not None and self.habits.of(entry.graph, entry.slot).keep:
            self.habits.kept(entry.graph, entry.slot, is_alone(entry.held))

    def _record(self, kind: str, entry: Entry, seq: int, started: float, where: str) -> None:
        trace.record((kind, entry.graph, entry.slot, seq, started, now(), entry.nbytes, where, self.engine.name))


def _find(entry: Entry, x: Tensor) -> Load:
    address = x.data_ptr()
    for load in entry.loads:
        if load.out.data_ptr() == address:
            return load
    raise RuntimeError(
        f"a wait for {entry.name} was given a tensor that no load of it returned, or one waited for already. Compiled "
        "autograd does that behind another backend: name ssd_fx as the backend of compiled autograd too, or turn "
        "torch._dynamo.config.compiled_autograd off"
    )


def _put_aside(entry: Entry) -> None:
    """From here on the owner of the tensor may write into its memory: what is there only moves elsewhere."""
    if entry.held is not None and entry.borrowed:
        aside = tensors.empty(entry.layout, entry.device, entry.ptr % 4096)
        tensors.copy_bytes(aside, entry.held)
        entry.held, entry.borrowed = aside, False
    entry.counter = None


_stores: dict[RuntimeConfig, Store] = {}


def get_store(config: str) -> Store:
    """The store of a configuration, made at its first use.

    Raises: ValueError for a bad configuration; OSError if its directories cannot be used.
    """
    parsed = parse(config)
    found = _stores.get(parsed)
    if found is None:
        with GUARD.lock:
            found = _stores.get(parsed) or _stores.setdefault(parsed, Store(parsed))
        janitor()  # from here on the death of its last graph is seen
    return found


def end_unused(config: RuntimeConfig, when_left: Callable[[], None]) -> None:
    """Ends the store of a configuration that no graph uses any more; not while something is stored, for a backward may
    come: `when_left` is called then, under the lock, whenever an entry has gone."""
    GUARD.drain()
    with GUARD.lock:
        store = _stores.get(config)
        if store is None:
            return
        if entries.has(store):
            store.when_left = when_left
            return
        store.end()
        del _stores[config]
    store.close()  # without the lock: other graphs go on
    if not _stores:
        POOL.trim()


def close_stores() -> None:
    """Ends all stores: I/O, threads and files. What is in memory can still be loaded; loading another is an error."""
    GUARD.drain()
    with GUARD.lock:
        for config, store in list(_stores.items()):
            store.end()
            del _stores[config]
            store.close()
    POOL.trim()


def _after_fork() -> None:
    _stores.clear()
    registry.forget_engines()
    POOL.after_fork()
    entries.after_fork()
    clock.forget()
    device_trace.clear()


def _at_exit() -> None:
    entries.close()
    close_stores()
    entries.forget()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
