"""Layouts of what is stored and of what is asked for; the bytes on disk are the dense storage in memory order."""

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


RELIES_ON = ("", "strides", "dtype", "address")
"""What the reader of a load relies on.

""         nothing: no view or copy is rebuilt from it, and it asks the tensor. So it gets what the forward had,
           whatever the metadata of the graph said.
"strides"  the strides asked for, and that the tensor begins its storage: views are rebuilt by their places in it.
"dtype"    the dtype too: there are views of another dtype.
"address"  strides and dtype, but not where in its storage the tensor begins: code that Inductor generated.
"""


def is_dense(size: Ints, stride: Ints) -> bool:
    """Whether the elements fill a range of memory without gap and overlap."""
    expected = 1
    for step, length in sorted((t, s) for s, t in zip(size, stride, strict=True) if s != 1):
        if step != expected:
            return False
        expected *= length
    return True


def dense_form(x: Tensor) -> Layout:
    """What is moved for `x`: its own layout if that is dense, else the range of memory that it spans."""
    size, stride = tuple(x.shape), x.stride()
    if x.is_contiguous() or not x.numel() or is_dense(size, stride):
        return Layout(size, stride, x.dtype)
    return Layout((1 + sum((n - 1) * t for n, t in zip(size, stride, strict=True)),), (1,), x.dtype)


def returned(seen: Layout, asked: Layout, relies_on: str, where: str) -> Layout:
    """The layout that a load returns where the forward had `seen` and the graph asks for `asked`.

    They differ where an operator returns something else than its FakeTensor promised.
    Raises: RuntimeError, naming `where`, if the reader could not do with it.
    """
    if relies_on not in RELIES_ON:
        raise ValueError(f"{where}: a load says that it relies on {relies_on!r}; right would be one of {RELIES_ON}")
    if asked == seen:
        return seen
    if asked.dtype != seen.dtype and relies_on in ("dtype", "address"):
        raise RuntimeError(
            f"{where}: the forward stored a tensor of {seen.dtype}, and the backward was compiled for {asked.dtype}. "
            "An operator returns another dtype than its fake (meta) implementation says: correct that"
        )
    if asked.size != seen.size:
        raise RuntimeError(
            f"{where}: a load asks for size {asked.size}, and what was stored has size {seen.size}: the backward and "
            "the forward that stored it are not of the same graph"
        )
    pairs = (steps for n, *steps in zip(seen.size, seen.stride, asked.stride, strict=True) if n != 1)
    # Strides along dimensions of size 1 are the forward's too: a kernel may choose its path by them.
    same = not relies_on or all(a == b for a, b in pairs)
    return seen if same else Layout(asked.size, asked.stride, seen.dtype)


def _holders(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))


def is_alone(x: Tensor) -> bool:
    """Whether `x`, a tensor object that only the caller knows, is the only tensor on its storage."""
    return _holders(x) == _ALONE


_VERSIONED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def alias(x: Tensor, layout: Layout) -> Tensor:
    """A tensor object of its own on x's bytes, in `layout`; it begins where `x` does."""
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
