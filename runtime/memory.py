"""Memory for tensors: recycled on the CPU, torch's own elsewhere."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ssd_fx.runtime.buffers import POOL
from ssd_fx.runtime.layout import Layout

POOLED = 64 << 10  # smaller CPU tensors come from torch's allocator


def empty(layout: Layout, device: torch.device, phase: int = 0) -> Tensor:
    """A dense tensor with any content; on the CPU its address is `phase` modulo a page: a read then needs no copy."""
    size, stride, dtype = layout
    nbytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or nbytes < POOLED:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    return POOL.tensor(size, stride, dtype, nbytes, phase)


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """The bytes of a dense tensor in memory order, into another one of equal size."""
    if source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.itemsize)
        return
    flat = (t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), (t.numel(),), (1,)) for t in (target, source))
    into, out_of = (t.view(torch.uint8) for t in flat)
    into.copy_(out_of)
