"""Memory for tensors, and copies between them.

On a device with streams, allocations and copies are in the order of the stream on which the caller computes. Nothing
here keeps an address longer than the tensor lives.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.layout import TensorMeta, alias


def empty(layout: TensorMeta, device: torch.device) -> Tensor:
    """A dense tensor with any content."""
    size, stride, dtype = layout
    queued = streams.of(device)
    if queued:
        return queued.empty(size, stride, dtype, device)
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copies the bytes of a dense tensor, in memory order, into another one of equal size."""
    queued = streams.of(source.device)
    if queued:
        queued.copy(queued.current(source.device), as_bytes(target), as_bytes(source))
    else:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize)


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copies the elements of a tensor into one of the same size and dtype, and of other strides."""
    queued = streams.of(source.device)
    if queued:
        queued.copy(queued.current(source.device), target, source)
    else:
        target.copy_(source)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a dense `x` in memory order: a uint8 view of the same storage."""
    return alias(x, TensorMeta((x.numel() * x.itemsize,), (1,), torch.uint8))
