"""Handles, and the table of the entries that they stand for.

A stand-in is what autograd saves instead of a saved tensor. It has that tensor's shape, dtype and device, which
autograd's hooks and `torch.utils.checkpoint` look at. All its strides are 0: its storage has one element.
A handle is a stand-in whose storage carries the number of an entry, so views of a handle are handles too. The entry
dies with that storage; a weakref on the storage reports its death.
"""

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ssd_fx.compat import _construct_storage_from_data_pointer, _disable_current_modes
from ssd_fx.runtime import errors, plans
from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.deaths import Guard
from ssd_fx.runtime.engines.base import Completion, Extent
from ssd_fx.runtime.layout import TensorMeta

if TYPE_CHECKING:
    from ssd_fx.runtime.device.streams import Stream
    from ssd_fx.runtime.prefetch import Run
    from ssd_fx.runtime.store import Store


class State(enum.Enum):
    """Where the bytes of an entry are. The values are those of `where` in the trace."""

    IN_MEMORY = "memory"
    ON_DISK = "disk"
    DONATED = "none"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class Load:
    """A tensor that `load` returned and `wait_load_` has not made valid yet, or a prefetch."""

    out: Tensor  # a wait finds its load by this tensor's address, which must not be reused meanwhile
    landing: Tensor  # where the bytes arrive: `out`, a tensor of the stored layout, or encoded bytes
    read: Completion | None  # None: forwarded, so the bytes are there
    seq: int
    same: bool = True  # False: `out` has other strides than the stored tensor, so the elements are copied one by one
    counted: int = 0  # bytes of it in `Reader.outstanding_bytes`
    stream: "Stream | None" = None  # of a prefetch: the compute stream whose memory `landing` is


@dataclass(eq=False, slots=True)
class Entry:
    """One stored tensor.

    `seen`: the layout of the forward's tensor. `layout`: the dense layout that is written and read. They differ where
    the forward's tensor has gaps or overlaps: then `layout` is the range of memory that the tensor spans.
    `held`: our reference, an alias of the tensor or its encoded bytes. None once the bytes are elsewhere.
    `counter`: a tensor that shares the version counter, also after the bytes have gone. `version`: the version at the
    store.
    """

    store: "Store"
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
    stream: "Stream | None" = None  # the compute stream that made the tensor, where the device has streams
    held: Tensor | None = None
    borrowed: bool = False  # `held` is the caller's memory, which the caller may overwrite after the release
    encoded: Encoded | None = None
    counter: Tensor | None = None
    version: int = 0
    storage: StorageWeakRef | None = None  # of the stored tensor, until we have looked whether writing it freed memory
    extent: Extent | None = None
    on_drive: bool = False  # the write goes to a drive
    write: Completion | None = None
    address: int = 0  # where the write reads
    early: bool = False  # it is written as soon as possible, and not only when the budget is full
    strict: bool = False  # there is no memory to read it before the plan says
    asked: bool = False  # a backward has loaded it
    lost: bool = False  # its store ended, and the bytes were on the drive only
    run: "Run | None" = None
    ahead: Load | None = None  # its prefetch
    loads: list[Load] = field(default_factory=list)

    @property
    def state(self) -> State:
        if self.lost:
            return State.LOST
        if self.held is not None:
            return State.IN_MEMORY
        return State.ON_DISK if self.extent or not self.nbytes else State.DONATED

    @property
    def moved_bytes(self) -> int:
        """The bytes that are written and read."""
        return self.encoded.nbytes if self.encoded else self.nbytes

    @property
    def name(self) -> str:
        """The slot, graph and bytes, and its place in the model if that is known, for messages."""
        where = plans.where(self.graph, self.slot)
        return f"slot {self.slot} of graph {self.graph!r} ({', '.join(filter(None, (where, f'{self.nbytes} B')))})"


_entries: dict[int, Entry] = {}
_numbers = itertools.count(1)
_inherited_below = 0
_closed = False


def stand_in(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that shape, dtype and device whose storage, its own, has one element: 0.

    Any other value could be a NaN, which Inductor's `nan_asserts` looks for in all outputs. The storages of a device
    are at one address, so a stand-in takes no memory and no kernel. It is never written to.
    """
    zero = _zeros.get(device)
    if zero is None:
        with _disable_current_modes(), torch.inference_mode(False):  # whoever comes first may be in any mode
            zero = _zeros.setdefault(device, torch.zeros(_LARGEST, dtype=torch.uint8, device=device))
    storage = _construct_storage_from_data_pointer(zero.data_ptr(), device, dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, (0,) * len(size))


_LARGEST = torch.complex128.itemsize
_zeros: dict[torch.device, Tensor] = {}


def mark(made: Tensor, number: int = 0) -> Tensor:
    """`made`, marked as a stand-in; of a handle `number` is that of its entry."""
    made.untyped_storage().ssd_fx = number  # type: ignore[attr-defined]
    return made


def is_stand_in(x: Tensor) -> bool:
    return hasattr(x.untyped_storage(), "ssd_fx")


def register(entry: Entry, handle: Tensor) -> None:
    """Makes `handle`, a stand-in, the handle of `entry`, which is released when the handle's storage dies."""
    if _closed:
        raise RuntimeError(f"store of {entry.name}: the interpreter is shutting down")
    number = next(_numbers)
    mark(handle, number)
    GUARD.watch(handle.untyped_storage(), number)
    _entries[number] = entry  # after `watch`, so that every entry in the table has a death to take it out


def lookup(handle: Tensor) -> Entry:
    """The entry of a handle.

    Raises: RuntimeError for a tensor that is no handle, and for a handle from before a fork.
    """
    GUARD.drain()  # deals with deaths first, so that no entry is found whose release a signal ended early
    number = getattr(handle.untyped_storage(), "ssd_fx", None)
    entry = _entries.get(number) if number else None
    if entry is not None:
        return entry
    raise errors.no_entry(handle, inherited=bool(number and number < _inherited_below), closed=bool(number))


def living() -> list[Entry]:
    """The entries whose handles live."""
    GUARD.drain()
    return list(_entries.values())


def of(store: "Store") -> list[Entry]:
    """The entries in `store`. Called under the lock."""
    return [entry for entry in list(_entries.values()) if entry.store is store]


def forget() -> None:
    """Drops all entries, whose I/O must have ended. Afterwards `lookup` of their handles raises."""
    _entries.clear()


def close() -> None:
    """Refuses new entries and ignores the deaths of handles from here on: for the end of the interpreter."""
    global _closed
    _closed = True


def after_fork() -> list[Entry]:
    """In the child: forgets the parent's entries and returns them. Touches none of their requests, threads or locks."""
    global _inherited_below
    GUARD.reset()
    inherited = list(_entries.values())
    forget()
    _inherited_below = next(_numbers)
    return inherited


def _bury(number: int) -> None:
    entry = None if _closed else _entries.get(number)
    if entry is not None:
        entry.store.release(entry)
        del _entries[number]  # after the release: one that a signal ended early is done again
        if entry.store.when_left:
            entry.store.when_left()


GUARD: Guard[int] = Guard(_bury)
"""The process-wide lock over all entries and stores. Nobody waits for I/O under it, except for cancelled pieces."""
