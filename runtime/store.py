"""The store: what the ops do with an entry, and who holds its bytes when. `docs/runtime.md` has the picture."""

import atexit
import errno
import os
import time

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime import engines, entries, memory, trace
from ssd_fx.runtime.buffers import POOL
from ssd_fx.runtime.config import RuntimeConfig, parse
from ssd_fx.runtime.engines import Memory, outcome
from ssd_fx.runtime.entries import GUARD, Entry, Load, State
from ssd_fx.runtime.layout import Ints, Match, check_storable, is_alone, match
from ssd_fx.runtime.stats import counters

ATTEMPTS = 3
now = time.perf_counter


class Store:
    """The entries of one configuration, over one engine. Methods with a leading underscore run under the lock."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.engine = engines.make_engine(config)
        self._cap = config.inflight
        self._writing: dict[Entry, None] = {}  # oldest first
        self._writing_bytes = 0

    def store(self, x: Tensor, graph: str, slot: int, seq: int) -> Tensor:
        """Starts the write of `x`, or keeps it in memory if that fails; the handle."""
        started = now()
        GUARD.drain()
        engines.check_device(self.engine, x.device)
        check_storable(x, f"store of slot {slot} of graph {graph!r}")
        size, nbytes = tuple(x.shape), x.numel() * x.itemsize
        entry = Entry(self, graph, slot, seq, nbytes, x.data_ptr(), size, x.stride(), x.dtype, x.device)
        handle = entries.register(entry)  # first: whatever happens next, its death releases the entry
        stall = self._write_when_room(entry, x) if nbytes else 0.0
        with GUARD.lock:
            c = counters(graph)
            c.stores += 1
            c.stall_s += stall
            c.forward(seq)
            where = "disk" if entry.extent else entry.state.value
            trace.record(("store", graph, slot, seq, started, now(), nbytes, where))
        return handle

    def wait_store_(self, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool) -> None:
        """The release: afterwards the entry does not depend on the caller's buffer."""
        started = now()
        if keepalive.data_ptr() != entry.ptr:
            raise RuntimeError(
                f"the release of {entry.name} was given another buffer than its store, so the stored one was not "
                "protected while it was written; the lowerings of store and wait_store_ must share one buffer"
            )
        with GUARD.lock:
            self._reap()
            write = None if hand_over else entry.write
        error = outcome(write) if write else None
        with GUARD.lock:
            if write and entry.write is write:
                self._finish_write(entry, error)
            if not hand_over and entry.x is not None:
                entry.x = _copy(entry.x, entry)
            c = counters(entry.graph)
            c.stall_s += now() - started if write else 0.0
            c.forward(seq)
            trace.record(("release", entry.graph, entry.slot, seq, started, now(), entry.nbytes, entry.state.value))

    def load(self, entry: Entry, size: Ints, stride: Ints, dtype: torch.dtype, seq: int, consume: bool) -> Tensor:
        """A tensor of that layout, valid after `wait_load_`."""
        started = now()
        how = match(entry.size, entry.stride, entry.dtype, (size, stride, dtype), entry.name)
        with GUARD.lock:
            self._reap()
            where = entry.state
            _count_freed(entry)
            load = self._begin_load(entry, (size, stride, dtype), how, seq, consume)
            if entry.nbytes:
                entry.loads.append(load)
            if load.read:
                load.read.start()
            c = counters(entry.graph)
            c.loads += 1
            c.forwarded_bytes += entry.nbytes if where is State.IN_MEMORY else 0
            c.backward(seq)
            trace.record(("load", entry.graph, entry.slot, seq, started, now(), entry.nbytes, where.value))
        return load.out

    def wait_load_(self, entry: Entry, x: Tensor, seq: int) -> None:
        """Returns when the bytes of `x`, a result of `load`, are there.

        Raises: OSError if they cannot be had; RuntimeError if no load of this entry returned `x`.
        """
        started = now()
        load = _find(entry, x) if entry.nbytes else None
        error = self._complete(entry, load) if load else None
        with GUARD.lock:
            if load:
                entry.loads.remove(load)
            c = counters(entry.graph)
            c.stall_s += now() - started
            c.backward(seq)
            where = "disk" if load and load.read else "memory"
            trace.record(("wait", entry.graph, entry.slot, seq, started, now(), entry.nbytes, where))
        if error:
            message = f"load of {entry.name} failed {ATTEMPTS} times: {error.strerror}"
            raise OSError(error.errno, message, error.filename) from error

    def release(self, entry: Entry) -> None:
        """The handle is dead: ends its I/O, gives extent and memory back. Called under the lock, twice if need be."""
        for load in entry.loads:
            if load.read:
                load.read.cancel()
        entry.loads.clear()
        self._cancel_write(entry)
        _count_freed(entry)
        entry.x = None
        extent, entry.extent = entry.extent, None
        if extent:
            self.engine.free(extent)

    def close(self) -> None:
        """Ends all I/O. Called under the lock."""
        self.engine.close()

    def _write_when_room(self, entry: Entry, x: Tensor) -> float:
        """Starts the write once the cap on bytes in flight allows it; seconds waited. Takes the lock itself."""
        started, stalled = now(), False
        while True:
            with GUARD.lock:
                self._reap()
                oldest = next(iter(self._writing), None)
                write = oldest.write if oldest else None
                if write is None or self._writing_bytes + entry.nbytes <= self._cap:
                    self._start_write(entry, x)
                    return now() - started if stalled else 0.0
            stalled = True
            outcome(write)  # whatever it is, _reap deals with it

    def _start_write(self, entry: Entry, x: Tensor) -> None:
        entry.x = x.detach()  # a tensor object of our own, so that is_alone() can tell whether others are left
        entry.storage = StorageWeakRef(x.untyped_storage())
        try:
            extent = self.engine.alloc(entry.nbytes)
        except OSError:  # the engine warned; the tensor stays in memory
            counters(entry.graph).kept_bytes += entry.nbytes
            return
        entry.extent = extent
        self._writing[entry] = None
        self._writing_bytes += entry.nbytes
        try:
            entry.write = self.engine.write(extent, Memory.of(entry.x))
            entry.write.start()
        except OSError as error:
            self._finish_write(entry, error)

    def _reap(self) -> None:
        """Drops the references to what has been written: from here on only others keep that memory."""
        for entry in list(self._writing):
            if entry.write is not None and entry.write.done():
                self._finish_write(entry, outcome(entry.write))

    def _finish_write(self, entry: Entry, error: OSError | None) -> None:
        c = counters(entry.graph)
        self._forget_write(entry, "failed" if error else "ok")
        if error is None:
            c.written_bytes += entry.nbytes
            entry.x = None
            return
        c.kept_bytes += entry.nbytes
        extent, entry.extent = entry.extent, None
        assert extent, "a write has an extent"
        self.engine.free(extent)
        if error.errno != errno.ECANCELED:
            self.engine.failed(extent, error)

    def _cancel_write(self, entry: Entry) -> None:
        """Afterwards nothing reads x's memory; the extent stays only if all of it had been written."""
        if entry not in self._writing:
            return
        if entry.write and not entry.write.cancel():
            self._finish_write(entry, None)
            return
        self._forget_write(entry, "cancelled")
        counters(entry.graph).cancelled_bytes += entry.nbytes
        extent, entry.extent = entry.extent, None
        assert extent, "a write has an extent"
        self.engine.free(extent)

    def _forget_write(self, entry: Entry, how: str) -> None:
        write, entry.write = entry.write, None
        del self._writing[entry]
        self._writing_bytes -= entry.nbytes
        if write:
            trace.record(("write", entry.graph, entry.slot, entry.seq, *write.span(), entry.nbytes, how))

    def _begin_load(
        self, entry: Entry, asked: tuple[Ints, Ints, torch.dtype], how: Match, seq: int, consume: bool
    ) -> Load:
        match entry.state:
            case State.GIVEN:
                raise RuntimeError(
                    f"{entry.name} was given away by an earlier backward; a second one (retain_graph=True) needs "
                    "torch._functorch.config.donated_buffer=False when the model is compiled"
                )
            case State.IN_MEMORY:
                return self._forward(entry, asked, how, seq, consume)
            case State.ON_DISK if not entry.nbytes:
                out = memory.empty(*asked, entry.device)
                return Load(out, out, None, seq)
            case State.ON_DISK:
                return self._read(entry, asked, how, seq)

    def _forward(
        self, entry: Entry, asked: tuple[Ints, Ints, torch.dtype], how: Match, seq: int, consume: bool
    ) -> Load:
        """From memory: the stored tensor itself if it may be given away and nobody else has it, else a copy."""
        x = entry.x
        assert x is not None, "in memory"
        if consume and how is Match.SAME and is_alone(x):
            self._cancel_write(entry)
            entry.x = None
            offset = x.storage_offset() * x.itemsize // asked[2].itemsize
            out = torch.empty(0, dtype=asked[2], device=x.device).set_(x.untyped_storage(), offset, asked[0], asked[1])
        elif how is Match.SAME:
            out = _empty(asked, entry)
            memory.copy_bytes(out, x, entry.nbytes)
        else:
            out = memory.empty(*asked, entry.device)
            memory.copy_elements(out, x)
        return Load(out, out, None, seq)

    def _read(self, entry: Entry, asked: tuple[Ints, Ints, torch.dtype], how: Match, seq: int) -> Load:
        if how is Match.SAME:
            out = target = _empty(asked, entry)
        else:
            target = _empty((entry.size, entry.stride, entry.dtype), entry)
            out = memory.empty(*asked, entry.device)
        assert entry.extent, "on disk"
        return Load(out, target, self.engine.read(entry.extent, Memory.of(target)), seq)

    def _complete(self, entry: Entry, load: Load) -> OSError | None:
        """Waits for a load's bytes, trying again after an error; the last error. Takes the lock itself."""
        error = outcome(load.read) if load.read else None
        for _ in range(ATTEMPTS - 1):
            if error is None:
                break
            with GUARD.lock:
                assert entry.extent, "on disk"
                load.read = self.engine.read(entry.extent, Memory.of(load.target))
                load.read.start()
            error = outcome(load.read)
        if load.read:
            how = "failed" if error else "ok"
            trace.record(("read", entry.graph, entry.slot, load.seq, *load.read.span(), entry.nbytes, how))
        if error is None and load.read:
            counters(entry.graph).read_bytes += entry.nbytes
            if load.target is not load.out:
                memory.copy_elements(load.out, load.target)
        return error


def _find(entry: Entry, x: Tensor) -> Load:
    address = x.data_ptr()
    for load in entry.loads:
        if load.out.data_ptr() == address:
            return load
    raise RuntimeError(
        f"a wait for {entry.name} was given a tensor that no load of it returned, or one waited for already"
    )


def _count_freed(entry: Entry) -> None:
    """Counts a written tensor once whose memory is really gone, because nobody else kept its storage."""
    if entry.x is None and entry.extent and entry.storage and entry.storage.expired():
        counters(entry.graph).freed_bytes += entry.nbytes
        entry.storage = None


def _empty(layout: tuple[Ints, Ints, torch.dtype], entry: Entry) -> Tensor:
    """A tensor for the entry's bytes, of the same phase as what was stored, so that a read needs no copy."""
    return memory.recycled(*layout, entry.device, entry.nbytes, entry.ptr)


def _copy(x: Tensor, entry: Entry) -> Tensor:
    """The bytes aside, where the owner of `x` cannot overwrite them."""
    out = _empty((entry.size, entry.stride, entry.dtype), entry)
    memory.copy_bytes(out, x, entry.nbytes)
    return out


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
    return found


def _after_fork() -> None:
    _stores.clear()
    engines.forget_engines()
    POOL.after_fork()
    entries.after_fork()


def close_stores() -> None:
    """Ends all I/O, closes the files and forgets the stores; what was stored in them is lost."""
    with GUARD.lock:
        for store in _stores.values():
            store.close()
        _stores.clear()
        entries.forget()
        engines.forget_engines()


def _at_exit() -> None:
    entries.close()
    close_stores()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
