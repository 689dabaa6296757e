"""Layouts of what is stored and of what is asked for; the bytes on disk are the dense storage in memory order."""

import enum
import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

Ints = tuple[int, ...]


class Layout(NamedTuple):
    """Sizes and strides in elements."""

    size: Ints
    stride: Ints
    dtype: torch.dtype


class Match(enum.Enum):
    """How an asked layout relates to the stored bytes."""

    SAME = "the same bytes in the same order"
    PERMUTED = "the same elements in another order"


def is_dense(size: Ints, stride: Ints) -> bool:
    """Whether the elements fill a range of memory without gap and overlap."""
    expected = 1
    for step, length in sorted((t, s) for s, t in zip(size, stride, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= length
    return True


def check_storable(x: Tensor, where: str) -> None:
    """Raises: TypeError, naming `where`, for a tensor whose bytes in memory order do not stand for it."""
    if not (x.is_contiguous() or is_dense(tuple(x.shape), x.stride())):
        layout = f"size {tuple(x.shape)} and stride {x.stride()}"
        raise TypeError(f"{where}: a tensor of {layout} has gaps or overlaps; store its base or a dense copy")


def match(stored: Layout, asked: Layout, where: str) -> Match:
    """How `asked` is had from a dense tensor that was stored.

    Raises: RuntimeError, naming `where`, if it is not had from those bytes.
    """
    if asked == stored:
        return Match.SAME
    size, stride, dtype = stored
    if size == asked[0] and dtype == asked[2]:
        steps = [[t for s, t in zip(size, strides, strict=True) if s != 1] for strides in (stride, asked[1])]
        return Match.SAME if steps[0] == steps[1] else Match.PERMUTED
    nbytes, wanted = (math.prod(s) * d.itemsize for s, d in ((size, dtype), (asked[0], asked[2])))
    if nbytes == wanted and _is_contiguous(size, stride) and _is_contiguous(asked[0], asked[1]):
        return Match.SAME
    raise RuntimeError(
        f"{where}: a load asks for size {asked[0]}, stride {asked[1]}, {asked[2]}, but what was stored has size "
        f"{size}, stride {stride}, {dtype}, and the bytes of one are not those of the other"
    )


def _is_contiguous(size: Ints, stride: Ints) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _holders(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))


def is_alone(x: Tensor) -> bool:
    """Whether `x`, a tensor object that only the caller knows, is the only tensor on its storage."""
    return _holders(x) == _ALONE


_VERSIONED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def alias(x: Tensor, layout: Layout) -> Tensor:
    """A tensor object of its own on x's bytes, in `layout`."""
    offset = x.storage_offset() * x.itemsize // layout.dtype.itemsize
    made = torch.empty(0, dtype=layout.dtype, device=x.device)
    return made.set_(x.untyped_storage(), offset, layout.size, layout.stride)


def versioned_alias(x: Tensor) -> Tensor:
    """A tensor object of our own on x's storage that shares x's version counter: it tells when somebody writes into it.

    Inductor's code runs with the dispatch key excluded under which `detach` shares the counter; 10 us to include it.
    """
    exclude = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude - _VERSIONED):
        return x.detach()


def let_go(alias: Tensor) -> None:
    """Drops the storage of a `versioned_alias`, which goes on to share the counter."""
    alias.data = _NOTHING if alias.device.type == "cpu" else torch.empty(0, device=alias.device)


_NOTHING = torch.empty(0)
