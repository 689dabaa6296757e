"""Where the bytes of a stored tensor are, and the two functions that change that.

    NEW --> [RESIDENT <-> ENCODING] --> WRITING --> ON_DISK --> LOST      each: its handle dies --> NEW
     |                |                    |
     `----------------+--------------------+------> KEPT --> DONATED

Arrows at the brackets are those of either state. What was just encoded passes through KEPT (`Writer._encode`).
`Ledger.move` changes the state of an entry, `Ledger.turn` that of a load. Both keep the sums of bytes right, and both
bear a Ctrl-C: Python raises it where something is called, so neither calls anything between its first change and its
last. Whatever is interrupted leaves an entry in one of its states, from which the next op, or its death, goes on. Only
room of the engine can be lost: on the way back from `alloc`, and on the way into `free`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime import plans
from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.engines.base import Completion, Engine, Extent
from ssd_fx.runtime.layout import TensorMeta, drop_storage

if TYPE_CHECKING:
    from ssd_fx.runtime.adapt.runs import Run
    from ssd_fx.runtime.device.streams import Stream
    from ssd_fx.runtime.store import Store


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Where the bytes of an entry are. `where`: what the trace says of it."""

    name: str
    where: str


class State:
    """No enum: with Python 3.11 it takes a call to find a member of one, which is 0.1 us."""

    NEW = Place("NEW", "none")  # not stored yet, or dead
    EMPTY = Place("EMPTY", "disk")  # there are no bytes
    KEPT = Place("KEPT", "memory")  # it stays there: nobody writes it
    RESIDENT = Place("RESIDENT", "memory")  # until it is written, if it is
    ENCODING = Place("ENCODING", "memory")  # by a thread that does not hold the lock
    WRITING = Place("WRITING", "memory")
    ON_DISK = Place("ON_DISK", "disk")
    DONATED = Place("DONATED", "none")  # the backward has it as its own
    LOST = Place("LOST", "lost")  # its store ended, and the bytes were on the drive only


WAITING = State.RESIDENT, State.ENCODING, State.WRITING


Stage = Literal["made", "ahead", "asked", "over"]
"""How far a load is. "ahead": it is read, and nobody has asked for it yet. "asked": the graph will wait for it."""


@dataclass(eq=False, slots=True)
class Load:
    """A tensor that `load` returned and `wait_load_` has not made valid yet, or a prefetch."""

    out: Tensor  # a wait finds its load by this tensor's address, which must not be reused meanwhile
    landing: Tensor  # where the bytes arrive: `out`, a tensor of the stored layout, or encoded bytes
    read: Completion | None  # None: forwarded, so the bytes are there
    seq: int
    same: bool = True  # False: `out` has other strides than the stored tensor, so the elements are copied one by one
    strict: bool = False  # the plan has no memory to read it earlier
    stream: Stream | None = None  # of a prefetch: the compute stream whose memory `landing` is
    stage: Stage = "made"
    counted: int = 0  # bytes of it in the sums of the ledger


@dataclass(eq=False, slots=True)
class Entry:
    """One stored tensor.

    `seen`: the layout of the forward's tensor. `layout`: the dense layout that is written and read. They differ where
    the forward's tensor has gaps or overlaps: then `layout` is the range of memory that the tensor spans.
    `counter`: a tensor that shares the version counter, also after the bytes have gone. `version`: the version at the
    store.

    Only the ledger changes what is under "state".
    """

    store: Store
    graph: str
    slot: int
    seq: int
    nbytes: int
    ptr: int
    layout: TensorMeta
    seen: TensorMeta
    device: torch.device
    tier: str = ""  # where the plan wants it: "host", "ssd", or "" for either
    binding: bool = False  # the plan needs its memory, so it is never resident
    later: bool = False  # it is resident until the next forward begins, whatever the budget
    timed: int = 0  # the number of runs that its nodes, which are timed on the device, stand for; 0: they are not timed

    # State.
    state: Place = State.NEW
    held: Tensor | None = None  # our reference while it is in memory: an alias of the tensor, or its encoded bytes
    borrowed: bool = False  # `held` is the caller's memory, which the caller may overwrite after the release
    in_use: bool = False  # the graph has not released it yet; noted only for an account
    encoded: Encoded | None = None
    moved_bytes: int = 0  # that are written and read: fewer than `nbytes` if it is encoded
    extent: Extent | None = None  # while it is written, and when it is on the drive
    ahead: Load | None = None  # its prefetch
    loads: dict[Load, None] = field(default_factory=dict)  # that were asked for and not waited for yet

    write: Completion | None = None  # while it is written, except before the transfer is made
    address: int = 0  # where the write reads
    on_drive: bool = False  # the write goes to a drive
    early: bool = False  # it is written as soon as possible, and not only when the budget is full
    stream: Stream | None = None  # the compute stream that made the tensor, where the device has streams
    counter: Tensor | None = None
    version: int = 0
    storage: StorageWeakRef | None = None  # of the stored tensor, until we have looked whether writing it freed memory
    asked: bool = False  # a backward has loaded it
    run: Run | None = None

    def __post_init__(self) -> None:
        self.moved_bytes = self.nbytes
        if not self.nbytes:
            self.state = State.EMPTY

    @property
    def name(self) -> str:
        """The slot, graph and bytes, and its place in the model if that is known, for messages."""
        where = plans.where(self.graph, self.slot)
        return f"slot {self.slot} of graph {self.graph!r} ({', '.join(filter(None, (where, f'{self.nbytes} B')))})"


class Ledger:
    """The entries of one store that are in memory to be written, and the sums of bytes that wait or move.

    All methods run under the lock of `entries`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.resident: OrderedDict[Entry, None] = OrderedDict()  # in the order in which they will be written
        self.writing: dict[Entry, None] = {}  # oldest first
        self.resident_bytes = 0
        self.writing_bytes = 0
        self.reading_bytes = 0  # of reads that have begun and were not waited for yet
        self.ahead_bytes = 0  # of these, prefetches that nobody has asked for yet
        self.in_use_bytes = 0  # of tensors that are resident or being written, and in use
        self.unreleased_bytes = 0  # of all tensors in use, wherever they are, but for binding ones

    def move(self, entry: Entry, to: Place, held: Tensor | None = None, encoded: Encoded | None = None) -> None:
        """Changes where the bytes of an entry are.

        A write gets room from the engine. An entry that is neither written nor on the drive any more gives its room
        back. `held`: the tensor that is held from here on, if it changes. Only at the store it is the caller's memory.
        `encoded`: how the tensor was encoded just now, if it was.

        Raises: OSError if there is no room for a write. Nothing has changed then.
        """
        before, was, write, had = entry.state, entry.held, entry.write, entry.extent
        old_bytes = entry.moved_bytes
        new_bytes = encoded.nbytes if encoded else old_bytes
        extent = had if to is State.ON_DISK or to is State.LOST else None
        waiting_bytes = self.resident_bytes + self.writing_bytes
        if to is State.WRITING:
            extent = self._engine.alloc(new_bytes, entry.tier)
        # No call from here on. `was`, `write` and `had` keep alive what the changes drop: a destructor could be a call.
        if before is not to:
            if before is State.RESIDENT:
                del self.resident[entry]
                self.resident_bytes -= old_bytes
            elif before is State.WRITING or before is State.ENCODING:
                del self.writing[entry]
                self.writing_bytes -= old_bytes
                entry.write = None
            if to is State.RESIDENT:
                self.resident[entry] = None
                self.resident_bytes += new_bytes
            elif to is State.WRITING or to is State.ENCODING:
                self.writing[entry] = None
                self.writing_bytes += new_bytes
            if entry.in_use:
                self.in_use_bytes += self.resident_bytes + self.writing_bytes - waiting_bytes
            entry.state = to
        entry.extent = extent
        entry.held = was if to.where == "memory" else None
        if held is not None:
            entry.held = held
            entry.borrowed = before is State.NEW
        if encoded:
            entry.encoded = encoded
            entry.moved_bytes = new_bytes
        # Calls may follow from here on.
        del write
        if was is not None and was is not entry.held and was is entry.counter:
            drop_storage(was)  # the entry keeps the tensor itself, which says whether somebody writes into it
        if had is not None and extent is not had:
            self._engine.free(had)

    def uses(self, entry: Entry) -> None:
        """Records that the graph has just stored a tensor, and will release it."""
        # No call from here on.
        entry.in_use = True
        if not entry.binding:
            self.unreleased_bytes += entry.nbytes

    def releases(self, entry: Entry) -> None:
        """Records that the graph reads a stored tensor no more. Ignores an entry that is not in use."""
        # No call from here on.
        if not entry.in_use:
            return
        entry.in_use = False
        if entry.state in WAITING:
            self.in_use_bytes -= entry.moved_bytes
        if not entry.binding:
            self.unreleased_bytes -= entry.nbytes

    def turn(self, entry: Entry, load: Load, to: Stage) -> None:
        """Changes how far a load is.

        A transfer starts after the turn to "ahead" or "asked", and ends before that to "over". So an interruption
        leaves no transfer that nobody knows of: the death of the entry ends it.
        """
        before, was = load.stage, load.counted
        nbytes = entry.moved_bytes if load.read and to in ("ahead", "asked") else 0
        # No call from here on.
        self.reading_bytes += nbytes - was
        if before == "ahead":
            self.ahead_bytes -= was
            entry.ahead = None
        elif before == "asked":
            del entry.loads[load]
        if to == "ahead":
            self.ahead_bytes += nbytes
            entry.ahead = load
        elif to == "asked":
            entry.loads[load] = None
        load.counted = nbytes
        load.stage = to
