"""Handles, and the table of the entries that they stand for.

A stand-in is what autograd saves instead of a saved tensor. It has that tensor's shape, dtype and device, which
autograd's hooks and `torch.utils.checkpoint` look at. All its strides are 0: its storage has one element.
A handle is a stand-in whose storage carries the number of an entry, so views of a handle are handles too. The entry
dies with that storage; a weakref on the storage reports its death.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ssd_fx.compat import _construct_storage_from_data_pointer, _disable_current_modes
from ssd_fx.runtime import errors
from ssd_fx.runtime.deaths import Guard
from ssd_fx.runtime.states import Entry

if TYPE_CHECKING:
    from ssd_fx.runtime.store import Store


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


def mark(made: Tensor) -> Tensor:
    """`made`, marked as a stand-in. A handle is marked with the number of its entry."""
    made.untyped_storage().ssd_fx = 0  # type: ignore[attr-defined]
    return made


def is_stand_in(x: Tensor) -> bool:
    return hasattr(x.untyped_storage(), "ssd_fx")


def register(entry: Entry, handle: Tensor) -> None:
    """Makes `handle`, a stand-in, the handle of `entry`, which is released when the handle's storage dies."""
    if _closed:
        raise RuntimeError(f"store of {entry.name}: the interpreter is shutting down")
    number = next(_numbers)
    storage = handle.untyped_storage()
    storage.ssd_fx = number  # type: ignore[attr-defined]
    GUARD.watch(storage, number)
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
        when_left = entry.store.when_left  # `keep_open` may clear it meanwhile
        if when_left:
            when_left()
        del _entries[number]  # last: what a signal ended early is done again


GUARD: Guard[int] = Guard(_bury)
"""The process-wide lock over all entries and stores. Nobody waits for I/O under it, except for cancelled pieces."""
