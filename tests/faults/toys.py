"""What is trained while I/O fails: small models, and engines that count what they gave away."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

import ssd_fx
from ssd_fx.runtime import trace
from ssd_fx.runtime.engines.base import Engine, Extent, outcome
from ssd_fx.runtime.entries import living
from tests.passes.lazy_engines import Unending
from tests.runtime.engines import DelayedEngine, Wrapped


class Toy(nn.Module):
    """linear -> sin, `layers` times; with `wide` every 8 values become so many and are summed up; linear -> tanh.

    For input of [64, 256]: the 64 KiB tensors go direct, with wide=1200 one of 9.8 MB goes in two pieces, and small
    ones bounce. What a matrix product puts out is saved, so nothing of this is recomputed.
    """

    def __init__(self, layers: int = 2, width: int = 256, wide: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.wide = nn.Linear(8, wide) if wide else None
        self.small = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        if self.wide is not None:
            x = x + self.wide(x.reshape(-1, 8)).sin().sum(-1).reshape(x.shape[0], -1).repeat(1, 8)
        loss: Tensor = self.small(x).tanh().square().sum()
        return loss


def compile_toy(model: nn.Module, directory: object, engine: str, **more: Any) -> Callable[[Tensor], Tensor]:
    """`model` with every tensor on disk that can leave, however small; not for dynamic shapes, whose tensors stay."""
    options: dict[str, Any] = {"dirs": [str(directory)], "engine": engine, "inner": "aot_eager"}
    options |= {"budget": 0, "min_bytes": 0, **more}
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend=ssd_fx.backend, options=options, dynamic=False)
    return compiled


def settle() -> None:
    """Waits until every write has ended, well or not, so that the backward reads what the disk has.

    A source of `tests/sources.py` may have writes that do not end.
    """
    for entry in living():
        if entry.write is not None and not isinstance(entry.write, Unending):
            outcome(entry.write)


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


class Counting(Wrapped):
    """Knows which extents are out, and passes failures on, so that a directory is retired as in production."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.out: set[Extent] = set()

    def alloc(self, nbytes: int, tier: str = "") -> Extent:
        extent = super().alloc(nbytes, tier)
        self.out.add(extent)
        return extent

    def free(self, extent: Extent) -> None:
        self.out.remove(extent)
        super().free(extent)

    def failed(self, extent: Extent, error: OSError) -> None:
        super().failed(extent, error)
        self.inner.failed(extent, error)


class Late(DelayedEngine):
    """Every write starts late, so that writes end in any order; failures are passed on."""

    def failed(self, extent: Extent, error: OSError) -> None:
        super().failed(extent, error)
        self.inner.failed(extent, error)


def complaint(error: OSError, directories: Collection[str]) -> str:
    """What is missing in the message of a failed load: path, offset, bytes and the tensor's name; "" if nothing."""
    text = str(error)
    wanted = {
        "a directory of ours as filename": error.filename in directories,
        "the tensor": re.search(r"slot \d+ of graph '[^']+' \([^()]*\d+ B\)", text),
        "offset and bytes": re.search(r"read of \d+ B at offset \d+", text),
    }
    return ", ".join(what for what, found in wanted.items() if not found)


def descriptors() -> dict[str, str]:
    """What every open descriptor of this process is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
    return found


def fill_the_trace() -> None:
    """The ring of events at its full size, 26 MB, so that it grows no more while memory is watched."""
    for number in range(trace.LENGTH):
        at = time.perf_counter()
        trace.record(trace.Event("store", "full", number, number, at, at, 1 << 20, "disk", "posix"))
