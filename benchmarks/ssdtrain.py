"""The method of SSDTrain (arXiv 2408.10013) as its text describes it, written small: a cache behind autograd's hooks.

- `pack` gives a saved tensor to a pool of threads that stores it, first in, first out; `unpack` gives it back.
- A tensor that is saved twice is stored once: it is known by its storage and its place there.
- Parameters stay, and so does what the last layer and the head save: their backward begins at once (its keep rule).
- Before the backward of a layer a second pool loads what the layer before it saved (its prefetch).
- What is still being stored when it is asked for is taken from memory (its forwarding).

Theirs runs on a GPU with direct storage. Here files are written through the page cache, and dropped from it when they
are written, so that reads come from the drive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

SMALL = 1 << 20  # bytes: what stays, as with ssd_fx


class Stored:
    """One saved tensor: in memory until it is stored, then in its file until it is loaded."""

    def __init__(self, x: Tensor, path: str) -> None:
        self.shape, self.stride, self.dtype = x.shape, x.stride(), x.dtype
        self.extent = 1 + sum((n - 1) * t for n, t in zip(x.shape, x.stride(), strict=True))
        self.path = path
        self.held: Tensor | None = x
        self.lock = threading.Lock()
        self.loading: Future[None] | None = None

    def store(self) -> int:
        """Write the file and drop the tensor, unless a load has come meanwhile. The bytes written."""
        x = self.held
        assert x is not None, "dropped by this method only"
        file = os.open(self.path, os.O_CREAT | os.O_WRONLY)
        try:
            view = memoryview(_bytes(x, self.extent))
            nbytes = len(view)
            while view:
                view = view[os.write(file, view) :]
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
        with self.lock:
            if self.loading is None:
                self.held = None
        return nbytes

    def load(self) -> None:
        """Bring the tensor back into memory."""
        with self.lock:
            if self.held is not None:
                return
        flat = torch.empty(self.extent, dtype=self.dtype)
        into = memoryview(_bytes(flat, self.extent))
        with open(self.path, "rb", buffering=0) as file:
            done = 0
            while done < len(into):
                done += file.readinto(into[done:]) or 0
        with self.lock:
            self.held = flat.as_strided(self.shape, self.stride)

    def __del__(self) -> None:
        if os.path.exists(self.path):
            os.remove(self.path)


def _bytes(x: Tensor, extent: int) -> Any:
    flat = x.detach().as_strided((extent,), (1,), x.storage_offset())
    return flat.view(torch.uint8).numpy().view(numpy.uint8)


class Cache:
    """The hooks of a model whose `layers` run in this order; files go to `directory`."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], directory: str) -> None:
        self.directory = directory
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.last = len(layers) - 1
        self.now = -1  # the layer that runs; beyond the last one the head
        self.known: dict[tuple[object, ...], Stored] = {}
        self.saved: dict[int, list[Stored]] = {}
        self.writes = ThreadPoolExecutor(1)
        self.reads = ThreadPoolExecutor(1)
        self.count = 0
        self.writing: list[Future[int]] = []
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, at=number: self._begin(at))
            layer.register_forward_hook(lambda *_, at=number: self._end(at))
            layer.register_full_backward_pre_hook(lambda *_, at=number: self._prefetch(at - 1))

    def hooks(self) -> AbstractContextManager[None]:
        """Around a forward."""
        self.known.clear()
        self.saved.clear()
        self.now = -1
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def written_bytes(self) -> int:
        """Of the stores since the last call. Waits for them, and raises what one of them raised."""
        ended, self.writing = self.writing, []
        return sum(each.result() for each in ended)

    def _begin(self, layer: int) -> None:
        self.now = layer

    def _end(self, layer: int) -> None:
        self.now = layer + 1

    def _pack(self, x: Tensor) -> Tensor | Stored:
        storage = x.untyped_storage().data_ptr()
        if self.now >= self.last or x.nbytes < SMALL or storage in self.own or x.device.type != "cpu":
            return x
        key = (storage, x.storage_offset(), x.shape, x.stride(), x.dtype)
        found = self.known.get(key)
        if found is None or found.held is None:  # memory that was freed meanwhile may belong to another tensor
            self.count += 1
            found = self.known[key] = Stored(x.detach(), os.path.join(self.directory, str(self.count)))
            self.saved.setdefault(self.now, []).append(found)
            self.writing.append(self.writes.submit(found.store))
        return found

    def _prefetch(self, layer: int) -> None:
        for stored in self.saved.pop(layer, []):
            with stored.lock:
                stored.loading = stored.loading or self.reads.submit(stored.load)

    def _unpack(self, packed: Tensor | Stored) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with packed.lock:
            if packed.held is not None:
                return packed.held
            if packed.loading is None:
                packed.loading = self.reads.submit(packed.load)
        packed.loading.result()
        assert packed.held is not None, "loaded"
        return packed.held
