"""The store of one configuration: what the ops do with an entry. `docs/runtime.md` has the picture."""

import math
import time
from collections.abc import Callable
from heapq import heappop, heappush

import torch
from torch import Tensor

from ssd_fx.options import TIERS, Options
from ssd_fx.runtime import entries, errors, stats, trace
from ssd_fx.runtime.account import Account, when_steady
from ssd_fx.runtime.adapt.habits import Habits
from ssd_fx.runtime.adapt.residency import Peak, Residency
from ssd_fx.runtime.adapt.runs import Runs
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.device.arrival import Arrival
from ssd_fx.runtime.engines import base
from ssd_fx.runtime.engines.base import Engine, outcome
from ssd_fx.runtime.entries import GUARD
from ssd_fx.runtime.layout import TensorMeta, dense_form, is_alone, is_parameter
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.memory.available import available_bytes
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.prefetch import Prefetcher
from ssd_fx.runtime.reader import ATTEMPTS, Reader
from ssd_fx.runtime.states import WAITING, Entry, Ledger, State
from ssd_fx.runtime.stats import counters
from ssd_fx.runtime.writer import Writer

now = time.perf_counter


class Store:
    """Stores and loads the tensors of all graphs with one configuration, through one engine.

    `resident_bytes`: the bytes that may be resident before they go to the engine.
    """

    def __init__(self, config: Options, engine: Engine, resident_bytes: int) -> None:
        self.engine = engine
        self.device = torch.device("cpu")  # of the tensor that was stored last
        self._config = config
        self._ranks = config.ranks.count
        most = config.resident_at_most if config.adapt else 0
        self.residency = Residency(resident_bytes, most, self._available_bytes, waits=config.slowdown)
        self.peak = Peak()
        self.habits = Habits(config.adapt)
        self.runs = Runs(self.habits)
        self.ledger = Ledger(self.engine)
        self.writer = Writer(self.engine, self.ledger, config, self.habits, self.residency, self.peak)
        self.reader = Reader(self.engine, self.ledger, self.writer)
        self.account = self._account(config) if config.memory else None
        window = 0 if config.memory else config.prefetch
        self.prefetcher = Prefetcher(self.reader, self.ledger, self.runs, window, self._spare, config.resident)
        self.when_left: Callable[[], None] | None = None  # called under the lock after the death of an entry

    def begin(self, graph: str, saved_bytes: int, device: torch.device, step: int, inflight: int = 0) -> None:
        """Prepares for a forward of `graph` on `device`, in step number `step`, that will save `saved_bytes`.

        `inflight`: the bytes that the plan has on their way out of memory at a time.
        """
        GUARD.drain()
        with GUARD.lock:
            if inflight > self.writer.planned.get(device, 0):
                self.writer.planned[device] = inflight
            self._learn()
            self.residency.begins(step)
            for entry in self.runs.begin(graph):
                self.reader.drop_ahead(entry)
            if self.account:
                self.account.begins(graph, saved_bytes, device)
                self._drop_ahead()
                if seen := self.account.seen:
                    stats.limited(seen.limit, seen.peak, seen.stayed)
        if self.account:  # more may have to go for this forward
            stall = self.writer.make_room(device)
            with GUARD.lock:
                counters(graph).stall_s += stall
                self.account.settled()
                steady = self.account.steady() if self._config.adapt else None
            if steady is not None:
                for told in when_steady:
                    told(self._config, steady)

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
        timed: int = 0,
    ) -> None:
        """Takes `x` over, and makes `handle` its handle.

        `x` is written, or is resident while the budget has room. A `binding` store is never resident, and one that is
        for `later` is resident until the next forward begins. If the write fails `x` stays in memory.

        Raises: ValueError for an unknown tier.
        """
        started = now()
        if tier and tier not in TIERS:
            right = f"right would be one of {tuple(sorted(TIERS))}"
            raise ValueError(f"a store of slot {slot} of graph {graph!r} names tier {tier!r}; {right}")
        GUARD.drain()
        if self.account:
            self._look()
        self.device = device = x.device
        if device.type == "cpu":
            streams.finish_copies_into(x)
        else:
            base.check_device(self.engine, device)
        seen = TensorMeta(tuple(x.shape), x.stride(), x.dtype)
        layout = seen if x.is_contiguous() else dense_form(x)
        nbytes = math.prod(layout.size) * x.itemsize
        entry = Entry(self, graph, slot, seq, nbytes, x.data_ptr(), layout, seen, device, tier, binding, later, timed)
        entries.register(entry, handle)  # before `accept`: if that raises, the handle's death releases the entry
        stall = self.writer.accept(entry, x) if nbytes else 0.0
        with GUARD.lock:
            self.runs.stored(entry)
            self.residency.stored(nbytes, self.ledger.resident_bytes)
            if stall:
                self.residency.waited(stall)
            self._record("store", entry, seq, started, "disk" if entry.extent else entry.state.where, stall)

    def wait_store_(
        self, entry: Entry, keepalive: Tensor, seq: int, hand_over: bool, block: bool = False, gone_by: int = -1
    ) -> None:
        """The release: the graph reads `keepalive`, the stored tensor, no more.

        `hand_over`: the caller drops its reference and writes nothing into the memory, so we may hold the tensor.
        Otherwise the release waits for a write that runs. If the tensor is still in memory afterwards, because no write
        ran or it failed, we copy it to memory of ours. A leaf that requires grad is not copied: it is its owner's, who
        may change it through `.data`.
        `block`: the plan needs the memory, so the release waits for the write in any case. `gone_by`: the plan needs it
        from the node of the backward with this `seq` on. A tensor that a device still copies then is dropped there;
        below 0 for none.

        If the write is a copy on a device, the tensor's stream waits for it, and not the host.

        Raises: RuntimeError if `keepalive` is not the memory that was stored.
        """
        started = now()
        if self.account:
            self._look()
        if keepalive.data_ptr() != entry.ptr:
            raise errors.another_buffer(entry)
        moves = not hand_over and not is_parameter(keepalive)
        with GUARD.lock:
            self.writer.reap()
            write = entry.write if block or not hand_over else None
            if write is not None and self.writer.follow(entry):
                write = None
            if gone_by >= 0 and entry.run is not None and entry.state in WAITING:
                heappush(entry.run.going, (gone_by, id(entry), entry))
            if write is None:  # under this lock: a store in another thread may begin to write the entry
                self._released(entry, moves)
        stall = 0.0
        if write is not None:
            arrival = Arrival(entry.device)
            error = outcome(write)
            stall = arrival.waited_s()
            with GUARD.lock:
                if entry.write is write:
                    self.writer.finish(entry, error)
                self._released(entry, moves)  # `moves`: what could not be written
        if self.account:
            stall += self.writer.make_room(entry.device)
        with GUARD.lock:
            if stall:
                self.residency.waited(stall)
            self._record("release", entry, seq, started, entry.state.where, stall)

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
        has no memory to read it earlier, so the runtime does not learn to, however long the graph waits.

        Raises: what `Reader.begin` raises.
        """
        started = now()
        stall = 0.0
        if self.account:
            self._look()
            stall = self._make_way(entry, consume)
        with GUARD.lock:
            self.writer.reap()
            if self.reader.stalls:
                self._learn()
            self._let_go(entry, seq)
            where = entry.state.where
            self.habits.asked(entry)
            load = self.reader.begin(entry, wanted, seq, consume=consume, relies_on=relies_on)
            load.strict = strict
            self.residency.loads(self.ledger.resident_bytes)
            if self.account:
                self.account.turns()
            self.prefetcher.asked(entry)
            self.writer.count_out(entry)
            if not self.account:
                self._record("load", entry, seq, started, where)
                return load.out
        stall += self.writer.make_room(entry.device)  # what is copied, or was encoded, is still held after the load
        with GUARD.lock:
            self.residency.waited(stall)
            counters(entry.graph).waited("write", entry.slot, stall)
            self._record("load", entry, seq, started, where)
        return load.out

    def wait_load_(self, entry: Entry, x: Tensor, seq: int) -> None:
        """Returns when the bytes of `x`, a result of `load`, are there for all that the graph does next.

        Raises: OSError if they cannot be had; RuntimeError if no load of this entry returned `x`.
        """
        started = now()
        if self.account:
            self._look()
        self._let_go(entry, seq)
        load = self.reader.find(entry, x) if entry.nbytes else None
        read = load.read if load else None
        waits = load if load and read and not self.reader.follow(entry, load) else None  # the host does
        stall, error = 0.0, None
        if waits:
            arrival = Arrival(entry.device)
            error = self.reader.complete(entry, waits)
            stall = arrival.waited_s()
        with GUARD.lock:
            if load:
                self.ledger.turn(entry, load, "over")
            if waits:
                self.residency.waited(stall)
                if not waits.strict:
                    self.habits.waited(entry.graph, entry.slot, stall)
            self.prefetcher.advance()
            self._record("wait", entry, seq, started, "disk" if read else "memory", stall)
        if error:
            raise errors.not_read(entry, ATTEMPTS, error) from error

    def _drop_ahead(self) -> None:
        """Ends all prefetches if more is held than may be held from here on."""
        assert self.account
        if self.ledger.ahead_bytes and self.writer.held_bytes > self.account.allowed(self.writer.outstanding_bytes):
            for entry in entries.of(self):
                self.reader.drop_ahead(entry)

    def _make_way(self, entry: Entry, consume: bool) -> float:
        """Makes room before a load that makes a tensor, because less may be held then. Returns the seconds waited."""
        with GUARD.lock:
            if consume and (entry.ahead or entry.state.where == "memory"):
                return 0.0
            self.writer.count_out(entry)
        return self.writer.make_room(entry.device)

    def _let_go(self, entry: Entry, seq: int) -> None:
        """Drops tensors that are still being written, and whose memory the plan needs when node `seq` of the backward
        of this entry's run begins (`gone_by`)."""
        run = entry.run  # `close` may take it from the entry
        if run is None or not run.going:
            return
        with GUARD.lock:
            going = run.going
            while going and going[0][0] <= seq:
                late = going[0][2]
                if late.state is State.WRITING:
                    self.writer.follow(late)
                heappop(going)

    def _released(self, entry: Entry, moves: bool) -> None:
        if moves:
            self._put_aside(entry)
        self.writer.release(entry)

    def _put_aside(self, entry: Entry) -> None:
        """Copies a tensor in the caller's memory to memory of ours: the caller may overwrite its own from here on.

        So the version of the caller's tensor says nothing about the stored one any more, and is not compared.
        """
        if entry.held is not None and entry.borrowed:
            aside = tensors.empty(entry.layout, entry.device)
            tensors.copy_bytes(aside, entry.held)
            self.ledger.move(entry, entry.state, aside)
        entry.counter = None

    def release(self, entry: Entry) -> None:
        """Ends the I/O of an entry whose handle is dead, and gives extent and memory back.

        Called under the lock, and once more if a signal ended the first call early.
        """
        if not entry.asked:
            self.habits.dies(entry)
        if entry.run is not None:
            self.runs.dead(entry)
        if entry.ahead or entry.loads:
            self.reader.forget(entry)
        if entry.state in WAITING:
            if isinstance(entry.write, streams.Queued) and entry.held is not None and not is_alone(entry.held):
                self.habits.freed(entry, False)  # the end of the copy would not free it either
            self.writer.give_away(entry)
        self.writer.in_vain.let_go()  # no op of ours comes behind the last load of a backward
        self.writer.count_out(entry)
        self.habits.judge(entry)
        self.ledger.move(entry, State.NEW)

    def end(self) -> None:
        """Ends the use of the engine: what is in memory stays there, and what is not is lost.

        A read that somebody waits for may still end well. Called under the lock. Then `close` is called.
        """
        self.writer.end()
        for entry in entries.of(self):
            self.runs.dead(entry)
            self.reader.drop_ahead(entry)
            if entry.state is State.ON_DISK:
                self.ledger.move(entry, State.LOST)

    def close(self) -> None:
        """Returns when all transfers have ended. Called once, after `end`; without the lock, other graphs go on."""
        try:
            self.engine.close()
        finally:
            self.writer.in_vain.wait()
            with GUARD.lock:
                self.writer.in_vain.let_go()

    def _account(self, config: Options) -> Account:
        writer, ranks = self.writer, config.ranks.count
        held, outstanding = lambda: writer.held_bytes, lambda: writer.outstanding_bytes
        found = Account(config.memory, ranks, held, outstanding, self.residency.allow)
        self.writer.limit = found.allowed
        return found

    def _look(self) -> None:
        """Lets the account measure, when a node of ours begins."""
        assert self.account
        with GUARD.lock:
            self.account.look()

    def _available_bytes(self) -> int:
        """This rank's share of the free memory; 0 on a GPU, where the next step needs what looks free between steps."""
        return available_bytes() // self._ranks if self.device.type == "cpu" else 0

    def _spare(self) -> int:
        """The bytes that may be read ahead: memory that resident tensors have left."""
        if self.account:  # plus `reading_bytes`, which the prefetcher subtracts: `held_bytes` has the reads ahead
            return max(0, self.account.allowed(0) - self.writer.held_bytes + self.ledger.reading_bytes)
        return self.residency.spare(self.ledger.resident_bytes)

    def _learn(self) -> None:
        """Counts how long devices have waited for reads, and learns from it."""
        for graph, slot, strict, seconds, of in self.reader.waits():
            counters(graph).waited("read", slot, seconds * of)
            if not strict:
                self.habits.waited(graph, slot, seconds)

    def _record(self, kind: str, entry: Entry, seq: int, started: float, where: str, waited: float = 0.0) -> None:
        """Counts an operator that ended, and notes it down for the trace."""
        if self.account:
            self.account.settled()
        graph, slot, nbytes = entry.graph, entry.slot, entry.nbytes
        c = counters(graph)
        backward = kind == "load" or kind == "wait"
        if backward:
            stats.turn()
        if kind == "store":
            c.stores += 1
        elif kind == "load":
            c.loads += 1
            if where == "memory":
                c.forwarded_bytes += nbytes
        if waited:
            c.waited("read" if backward else "write", slot, waited)
        live = CPU_ALLOCATOR.live_bytes
        trace.record((kind, graph, slot, seq, started, now(), nbytes, where, self.engine.name, live, waited))
