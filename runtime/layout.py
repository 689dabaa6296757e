"""Layouts of stored and of loaded tensors. The bytes on disk are those of the dense storage, in memory order."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ssd_fx.compat import (
    DispatchKey,
    _disable_current_modes,
    _dispatch_tls_is_dispatch_key_excluded,
    _dispatch_tls_set_dispatch_key_excluded,
    _storage_Use_Count,
)

Ints = tuple[int, ...]


class TensorMeta(NamedTuple):
    """The metadata of a tensor: sizes, and strides in elements. `passes/groups.py` has those of plans."""

    size: Ints
    stride: Ints
    dtype: torch.dtype


RELIES_ON = ("", "strides", "dtype", "address")
"""What the reader of a load takes for granted about the tensor it gets.

""         nothing: the graph is interpreted, and rebuilds no view or copy from the tensor. So it gets the layout that
           the forward had, whatever the metadata of the graph said.
"strides"  the strides asked for, and storage offset 0: views are rebuilt by their places in the storage.
"dtype"    the dtype too: there are views of another dtype.
"address"  strides and dtype, but any storage offset: code that Inductor generated.
"""


def _is_non_overlapping_and_dense(size: Ints, stride: Ints) -> bool:
    """Whether the elements fill a range of memory without gap and overlap."""
    dimensions = [(step, length) for length, step in zip(size, stride, strict=True) if length != 1]
    expected = 1
    for step, length in sorted(dimensions):
        if step != expected:
            return False
        expected *= length
    return True


def dense_form(x: Tensor) -> TensorMeta:
    """The layout of what is stored for `x`: its own if that is dense, else the range of memory that it spans."""
    size = tuple(x.shape)
    stride = x.stride()
    if x.is_contiguous() or not x.numel() or _is_non_overlapping_and_dense(size, stride):
        return TensorMeta(size, stride, x.dtype)
    last = sum((n - 1) * t for n, t in zip(size, stride, strict=True))
    return TensorMeta((last + 1,), (1,), x.dtype)


def returned(seen: TensorMeta, asked: TensorMeta, relies_on: str, where: Callable[[], str]) -> TensorMeta:
    """The layout that a load returns where the forward had `seen` and the graph asks for `asked`.

    The two differ where an operator returns something else than its FakeTensor promised.

    Raises: RuntimeError if the reader cannot use what was stored; ValueError for another `relies_on`. `where` says of
    which tensor.
    """
    if relies_on not in RELIES_ON:
        raise ValueError(f"{where()}: a load says that it relies on {relies_on!r}; right would be one of {RELIES_ON}")
    if asked == seen:
        return seen
    if asked.dtype != seen.dtype and relies_on in ("dtype", "address"):
        raise RuntimeError(
            f"{where()}: the forward stored a tensor of {seen.dtype}, and the backward was compiled for {asked.dtype}. "
            "An operator returns another dtype than its fake (meta) implementation says: correct that"
        )
    if asked.size != seen.size:
        raise RuntimeError(
            f"{where()}: a load asks for size {asked.size}, and what was stored has size {seen.size}: the backward and "
            "the forward that stored it are not of the same graph"
        )
    steps = [(a, b) for n, a, b in zip(seen.size, seen.stride, asked.stride, strict=True) if n != 1]
    if not relies_on or all(a == b for a, b in steps):
        return seen  # with the forward's strides along dimensions of size 1: a kernel may choose its path by them
    return TensorMeta(asked.size, asked.stride, seen.dtype)


def _holders(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return _storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))


def is_alone(x: Tensor) -> bool:
    """Whether `x` is the only tensor on its storage. Only the caller may refer to the object `x`."""
    return _holders(x) == _ALONE


def is_foreign(x: Tensor) -> bool:
    """Whether the memory of `x` belongs to somebody else than torch: a NumPy array, a mapped file, another process.

    Its owner may use it when no tensor is left. Most such storages cannot be resized; shared memory can.
    """
    storage = x.untyped_storage()
    return not storage.resizable() or (x.device.type == "cpu" and storage.is_shared())


def is_parameter(x: Tensor) -> bool:
    """Whether `x` is a parameter, a view of one, or an input whose gradient is accumulated.

    Its owner keeps it in any case. FSDP1 gives views of a flat parameter to its modules, and frees their memory behind
    the forward, whoever reads it.
    """
    return (x.requires_grad and x.is_leaf) or (x._is_view() and isinstance(x._base, torch.nn.Parameter))


_VERSIONED = DispatchKey.ADInplaceOrView


def alias(x: Tensor, layout: TensorMeta) -> Tensor:
    """Another tensor object on x's bytes, in `layout`; it begins where `x` does."""
    offset = x.storage_offset() * x.itemsize // layout.dtype.itemsize
    made = torch.empty(0, dtype=layout.dtype, device=x.device)
    return made.set_(x.untyped_storage(), offset, layout.size, layout.stride)


def versioned_alias(x: Tensor) -> Tensor:
    """Another tensor object on x's storage, which shares x's version counter: the counter shows a write into `x`.

    `detach` shares the counter under one dispatch key, which Inductor's code excludes.
    """
    excluded = _dispatch_tls_is_dispatch_key_excluded(_VERSIONED)
    try:
        _dispatch_tls_set_dispatch_key_excluded(_VERSIONED, False)
        return x.detach()
    finally:
        _dispatch_tls_set_dispatch_key_excluded(_VERSIONED, excluded)


def drop_storage(alias: Tensor) -> None:
    """Drops the storage of a `versioned_alias`, which still shares the counter afterwards."""
    nothing = _nothing.get(alias.device)
    if nothing is None:
        with _disable_current_modes(), torch.inference_mode(False):  # whoever comes first may be in any mode
            nothing = _nothing.setdefault(alias.device, torch.empty(0, device=alias.device))
    alias.data = nothing


_nothing: dict[torch.device, Tensor] = {}
