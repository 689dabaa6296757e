"""The fake GPU as a device that computes: kernels and library calls are queued, and memory goes round at once.

What is queued works on addresses, so it keeps nothing alive. Memory that a tensor leaves is the next one's at once, and
is spoiled in the order of the compute stream: a transfer that is not ordered before that finds garbage.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ssd_fx.runtime.device import clock, device_trace, streams
from ssd_fx.runtime.stores import close_stores
from tests.runtime.fake_gpu import GARBAGE, Block, FakeGpu, FakeStream

ALIGNMENT = 512  # bytes: CUDA's allocator has no other addresses and sizes


class AlignedBlock(Block):
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.live = nbytes, True
        self.memory = ctypes.create_string_buffer(bytes([GARBAGE]) * (nbytes + ALIGNMENT), nbytes + ALIGNMENT)
        self.address = -(-ctypes.addressof(self.memory) // ALIGNMENT) * ALIGNMENT


class LateGpu(FakeGpu):
    """`launched`: how many kernels and library calls of each name were given to the compute stream."""

    block, granule = AlignedBlock, ALIGNMENT

    def __init__(self, order: str | int = "lazy") -> None:
        super().__init__(order)
        self.launched: Counter[str] = Counter()

    def launch(self, name: str, function: Callable[..., Any], *args: Any, **named: Any) -> None:
        """Queues a call on the compute stream. It gets what is at the addresses of its tensors when it runs."""
        self.launched[name] += 1
        leaves, form = pytree.tree_flatten((args, named))
        later = [self._later(leaf, name) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def run() -> None:
            found = [leaf() if isinstance(leaf, _Later) else leaf for leaf in later]
            args, named = pytree.tree_unflatten(found, form)
            function(*args, **named)

        self.queue(self.compute, run)

    def queue(self, stream: FakeStream, task: Callable[[], None], ms: float = 1.5) -> None:
        def run() -> None:
            with _disable_current_modes():  # it runs at any time, and is no call of the step
                task()

        super().queue(stream, run, ms)

    def put(self, x: Tensor) -> Tensor:
        """A leaf on the device with the values of `x`."""
        made = self.empty(tuple(x.shape), x.stride(), x.dtype, None)
        return made.copy_(x.detach()).requires_grad_(x.requires_grad)

    def _later(self, x: Tensor, name: str) -> Tensor | _Later:
        storage = x.untyped_storage()
        if not x.numel() or storage.data_ptr() not in self.blocks:
            return x  # the host's
        self.check(storage.data_ptr(), storage.nbytes(), f"what {name} is given")
        return _Later(x)

    def _give_back(self, block: Block) -> None:
        self.queue(self.compute, lambda: ctypes.memset(block.address, GARBAGE, block.nbytes) and None, ms=0.0)
        super()._give_back(block)


class _Later:
    """A tensor of the device without its owner: what is there when it is called."""

    def __init__(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._memory = (storage.data_ptr(), storage.nbytes(), x.dtype)
        self._layout = (x.storage_offset(), x.size(), x.stride())
        self._lazily = [bit for bit, has in ((torch._conj, x.is_conj()), (torch._neg_view, x.is_neg())) if has]

    def __call__(self) -> Tensor:
        address, nbytes, dtype = self._memory
        flat = torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
        found = torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), *self._layout)
        for bit in self._lazily:
            found = bit(found)
        return found


_present: list[LateGpu] = []


def present() -> LateGpu:
    """The device of this moment."""
    return _present[-1]


@contextmanager
def installed(order: str | int) -> Iterator[LateGpu]:
    """CPU tensors are those of a fresh device, which everything of the runtime sees."""
    gpu = LateGpu(order)
    _present.append(gpu)
    streams.BACKENDS["cpu"] = gpu
    try:
        yield gpu
    finally:
        gpu.finish()
        close_stores()
        clock.forget()
        device_trace.clear()
        del streams.BACKENDS["cpu"]
        _present.remove(gpu)
