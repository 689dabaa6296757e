"""Handles and what they stand for.

A handle is a 0-dim int64 tensor whose value is the number of an entry. The entry lives until the handle's *storage*
dies: a weakref on the ctypes object under that storage tells, whatever views or copies of the tensor object existed.
"""

import ctypes
import enum
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.engines import Completion, Extent
from ssd_fx.runtime.guard import Guard
from ssd_fx.runtime.layout import Layout

if TYPE_CHECKING:
    from ssd_fx.runtime.prefetch import Run
    from ssd_fx.runtime.store import Store


class State(enum.Enum):
    """Where the bytes of an entry are. The value is what the trace says."""

    IN_MEMORY = "memory"
    ON_DISK = "disk"
    GIVEN = "none"


@dataclass(eq=False, slots=True)
class Load:
    """A tensor that `load` returned and `wait_load_` has not made valid yet, or one that is read ahead."""

    out: Tensor  # the reference keeps its address from meaning anything else
    landing: Tensor  # where the bytes arrive: `out`, a tensor of the stored layout, or encoded bytes
    read: Completion | None  # None: forwarded, the bytes are there
    seq: int
    same: bool = True  # the bytes of `out` are the stored ones, in their order
    started: bool = False
    counted: int = 0


@dataclass(eq=False, slots=True)
class Entry:
    """One stored tensor.

    `held` is our reference, None once the bytes are elsewhere: an alias of our own of the tensor, or its encoded bytes.
    `counter` tells the tensor's version, also when its bytes have gone; `version` is the one it had when it was stored.
    """

    store: "Store"
    graph: str
    slot: int
    seq: int
    nbytes: int
    ptr: int
    layout: Layout
    device: torch.device
    tier: str = ""  # where the plan wants it, if there is such a tier
    binding: bool = False  # it may not rest
    held: Tensor | None = None
    encoded: Encoded | None = None
    counter: Tensor | None = None
    version: int = 0
    storage: StorageWeakRef | None = None
    extent: Extent | None = None
    write: Completion | None = None
    early: bool = False
    strict: bool = False  # there is no memory to read it before the plan says
    run: "Run | None" = None
    ahead: Load | None = None
    loads: list[Load] = field(default_factory=list)

    @property
    def state(self) -> State:
        if self.held is not None:
            return State.IN_MEMORY
        return State.ON_DISK if self.extent or not self.nbytes else State.GIVEN

    @property
    def moved_bytes(self) -> int:
        """Bytes that go to the disk and back."""
        return self.encoded.nbytes if self.encoded else self.nbytes

    @property
    def name(self) -> str:
        """For messages."""
        return f"slot {self.slot} of graph {self.graph!r} ({self.nbytes} B)"


_entries: dict[int, Entry] = {}
_numbers = itertools.count(1)
_inherited_below = 0
_closed = False
_Cell = ctypes.c_int64 * 1


def register(entry: Entry) -> Tensor:
    """A handle for `entry`, which is released when the handle's storage dies."""
    if _closed:
        raise RuntimeError(f"store of {entry.name}: the interpreter is shutting down")
    number = next(_numbers)
    cell = _Cell(number)
    GUARD.watch(cell, number)
    _entries[number] = entry  # last: from here on the cell's death takes it out again
    return torch.frombuffer(cell, dtype=torch.int64).resize_(())


def lookup(handle: Tensor) -> Entry:
    """The entry of a handle.

    Raises: RuntimeError for a handle whose storage died, or that comes from before a fork.
    """
    GUARD.drain()  # what is half buried is dead
    number = int(handle.item())
    entry = _entries.get(number)
    if entry is not None:
        return entry
    if number < _inherited_below:
        message = "was stored by the parent process before a fork; run forward and backward in the same process"
    else:
        message = (
            "is not known any more: its storage died, as happens when torch.autograd.graph.saved_tensors_hooks copy a "
            "saved handle and drop the original; take the compiled region out of those hooks"
        )
    raise RuntimeError(f"ssd_fx handle {number} {message}")


def living() -> list[Entry]:
    """All entries whose handles live."""
    GUARD.drain()
    return list(_entries.values())


def forget() -> None:
    """Drops all entries, whose I/O has ended; their handles are dead."""
    _entries.clear()


def close() -> None:
    """No entries from here on, and handles may die without consequence: for the end of the interpreter."""
    global _closed
    _closed = True


def after_fork() -> None:
    """In the child: the parent's entries are not ours; no request, thread or lock of theirs is touched."""
    global _inherited_below
    GUARD.reset()
    forget()
    _inherited_below = next(_numbers)


def _bury(number: int) -> None:
    entry = None if _closed else _entries.get(number)
    if entry is not None:
        entry.store.release(entry)
        del _entries[number]  # last: a release that a signal ended early is done again


GUARD: Guard[int] = Guard(_bury)
"""The process-wide lock: over all entries and stores. Nobody waits for I/O under it, except for cancelled pieces."""
