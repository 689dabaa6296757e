"""Memory for what is loaded, and copies of bytes, on whatever device the tensors are.

On a device with streams both are in the order of the stream on which the caller computes, and nothing here knows an
address longer than the tensor that has it.
"""

import ctypes

import torch
from torch import Tensor

from ssd_fx.runtime import streams
from ssd_fx.runtime.buffers import PAGE, POOL
from ssd_fx.runtime.layout import Ints

POOLED = 64 << 10  # smaller CPU tensors come from torch's allocator


def empty(size: Ints, stride: Ints, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of that layout with any content."""
    queued = streams.of(device)
    if queued:
        return queued.empty(size, stride, dtype, device)
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def recycled(size: Ints, stride: Ints, dtype: torch.dtype, device: torch.device, nbytes: int, address: int) -> Tensor:
    """The same for `nbytes` that a transfer will fill, on the CPU from the pool and of the phase of `address`: direct
    I/O then needs no copy, and the pages are warm. Device memory is recycled by its own allocator."""
    if streams.of(device) or nbytes < POOLED:
        return empty(size, stride, dtype, device)
    return POOL.tensor(size, stride, dtype, nbytes, address % PAGE)


def copy_bytes(target: Tensor, source: Tensor, nbytes: int) -> None:
    """The bytes of a dense tensor into another dense one of any dtype."""
    queued = streams.of(source.device)
    if queued:
        queued.copy(queued.current(source.device), as_bytes(target, nbytes), as_bytes(source, nbytes))
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)


def copy_elements(target: Tensor, source: Tensor) -> None:
    """The elements of a tensor into one of the same size and dtype, and of other strides."""
    queued = streams.of(source.device)
    if queued:
        queued.copy(queued.current(source.device), target, source)
    else:
        target.copy_(source)


def as_bytes(x: Tensor, nbytes: int) -> Tensor:
    """The `nbytes` that a dense `x` spans, in memory order, as uint8 on the same storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(
        x.untyped_storage(), x.storage_offset() * x.itemsize, (nbytes,), (1,)
    )
