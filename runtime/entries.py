"""Handles and what they stand for.

A stand-in takes the place of a saved tensor. Whoever looks at it (autograd's hooks, `torch.utils.checkpoint`) sees the
shape, dtype and device of that tensor. All its strides are 0: its storage has one element, with any value.
A handle is a stand-in whose storage bears the number of an entry, so views of it are handles too. The entry lives until
that storage dies, which a weakref on the storage tells.
"""

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.engines.base import Completion, Extent
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
    LOST = "lost"


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

    `layout` is what is moved: dense. `seen` is the layout that the forward's tensor has. The two differ where that one
    has gaps or overlaps: then `layout` is the range of memory that it spans.
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
    seen: Layout
    device: torch.device
    tier: str = ""  # where the plan wants it, if there is such a tier
    binding: bool = False  # it may not rest
    held: Tensor | None = None
    borrowed: bool = (
        False  # `held` is the memory of the stored tensor, which its owner may write into after the release
    )
    encoded: Encoded | None = None
    counter: Tensor | None = None
    version: int = 0
    storage: StorageWeakRef | None = None
    extent: Extent | None = None
    write: Completion | None = None
    early: bool = False
    strict: bool = False  # there is no memory to read it before the plan says
    lost: bool = False  # its store ended, and the bytes were on the drive only
    run: "Run | None" = None
    ahead: Load | None = None
    loads: list[Load] = field(default_factory=list)

    @property
    def state(self) -> State:
        if self.lost:
            return State.LOST
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


def stand_in(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape, dtype and device whose storage has one element."""
    return torch.empty_strided(size, (0,) * len(size), dtype=dtype, device=device)


def mark(made: Tensor, number: int = 0) -> Tensor:
    """`made`, a stand-in whose storage says so; of a handle it bears the number of the entry."""
    made.untyped_storage().ssd_fx = number  # type: ignore[attr-defined]
    return made


def is_stand_in(x: Tensor) -> bool:
    return hasattr(x.untyped_storage(), "ssd_fx")


def register(entry: Entry, handle: Tensor) -> None:
    """Makes the stand-in `handle` stand for `entry`, which is released when the handle's storage dies."""
    if _closed:
        raise RuntimeError(f"store of {entry.name}: the interpreter is shutting down")
    number = next(_numbers)
    mark(handle, number)
    GUARD.watch(handle.untyped_storage(), number)
    _entries[number] = entry  # last: from here on the storage's death takes it out again


def lookup(handle: Tensor) -> Entry:
    """The entry of a handle.

    Raises: RuntimeError for a tensor that is no handle, and for a handle from before a fork.
    """
    GUARD.drain()  # what is half buried is dead
    number = getattr(handle.untyped_storage(), "ssd_fx", None)
    entry = _entries.get(number) if number else None
    if entry is not None:
        return entry
    if number and number < _inherited_below:
        message = "was stored by the parent process before a fork; run forward and backward in the same process"
    elif number:
        message = "is gone: the store was closed while a backward was still to come"
    else:
        message = (
            "is none: what the forward saved was exchanged for another tensor. "
            "torch.autograd.graph.saved_tensors_hooks do that when they copy what they pack (save_on_cpu does), and "
            "the handle's storage died then; take the compiled region out of those hooks. torch.utils.checkpoint does "
            "it where the forward that runs again runs another compiled graph, as for another size; mark what varies "
            "with torch._dynamo.mark_dynamic"
        )
    raise RuntimeError(f"an ssd_fx handle of shape {list(handle.shape)} and {handle.dtype} {message}")


def lost(entry: Entry) -> RuntimeError:
    """What to raise where the bytes of an entry are asked for that went with its store."""
    return RuntimeError(
        f"{entry.name} was lost: ssd_fx.close() was called between its forward and its backward, and closed the file "
        "that it was in; run the forward again"
    )


def living() -> list[Entry]:
    """All entries whose handles live."""
    GUARD.drain()
    return list(_entries.values())


def of(store: "Store") -> list[Entry]:
    """Those in `store`. Called under the lock."""
    return [entry for entry in _entries.values() if entry.store is store]


def has(store: "Store") -> bool:
    """Whether any is in `store`. Called under the lock."""
    return any(entry.store is store for entry in _entries.values())


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
        if entry.store.when_left:
            entry.store.when_left()


GUARD: Guard[int] = Guard(_bury)
"""The process-wide lock: over all entries and stores. Nobody waits for I/O under it, except for cancelled pieces."""
