"""Steps of a transformer on a GPU, for gpu_ways.py."""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import families  # neighbours of this file
import torch
from families import train_gpt
from gpu_bandwidth import synchronize
from moved import Moved
from torch.profiler import ProfilerActivity

import ssd_fx
from ssd_fx.runtime.device import device_trace

LARGEST = 8  # kernels that are named
COPIES = ("Memcpy", "Memset")  # how the profiler calls what is no kernel
OPTIMIZERS: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Step(Moved):
    """`graph_s`: of `time_s`, forward and backward."""

    time_s: float
    peak_bytes: int
    loss: float
    graph_s: float


class Training:
    """A model, its optimizer and its batches. `compiled` makes the forward of a step, under `around`; `ours`: with
    ssd_fx.

    A step is forward, backward and optimizer, with a synchronisation before each half and behind it. The peak is that
    of forward and backward above the level before them, as torch's allocator counts; gradients lie below that level.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        self.device, self.amp, self.ours = torch.device(flags.device), flags.amp, False
        torch.manual_seed(flags.seed)
        shape = train_gpt.Shape(flags.layers, flags.width, flags.heads, flags.seq, flags.dropout)
        with self.device:  # a wide model takes minutes to initialise on the CPU
            words = families.WORDS if flags.family == "long" else train_gpt.VOCABULARY
            self.model = families.make(flags.family, shape, words)
        if flags.bfloat16:
            self.model.bfloat16()
        self.compiled: Callable[..., Any] = self.model
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.optimizer = OPTIMIZERS[flags.optimizer](self.model.parameters(), lr=flags.lr)
        self.batches = families.batches(flags.family, flags.batch, flags.seq, flags.seed)

    def step(self) -> Step:
        inputs, targets = (x.to(self.device) for x in next(self.batches))
        self.optimizer.zero_grad(set_to_none=False)
        ssd_fx.reset_stats()
        synchronize(self.device)
        level = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp), self.around():
            loss = self.compiled(inputs, targets)
        loss.backward()
        synchronize(self.device)
        graph_s = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - level if self.device.type == "cuda" else 0
        self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        seen = asdict(ssd_fx.stats()) if self.ours else {}
        return Step(seconds, peak, loss.item(), graph_s, **Step.figures(seen))


def no_events() -> None:
    """From here on no node has events around it, so that the steps after the first are like all later ones."""
    device_trace.node = lambda *_: device_trace.UNTIMED


def kernels(training: Training, trace: Path | None) -> dict[str, Any]:
    """Kernels and copies of one step: how many, their time on the device, and which take longest. Its timeline goes to
    `trace`, with our events beside torch's."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (training.device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profile:
        training.step()
    if trace is not None:
        with tempfile.TemporaryDirectory(prefix="ssd_fx-gpu-") as scratch:
            plain, both = Path(scratch) / "torch.json", Path(scratch) / "both.json"
            profile.export_chrome_trace(str(plain))
            ssd_fx.export_trace(both, profile=plain)
            trace.write_bytes(gzip.compress(both.read_bytes()))
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return summed([(e.name, e.time_range.elapsed_us()) for e in on_device])


def summed(events: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Of (name, microseconds)."""
    computing = [(name, us) for name, us in events if not name.startswith(COPIES)]
    by_name: dict[str, float] = {}
    for name, us in computing:
        by_name[name] = by_name.get(name, 0.0) + us
    largest = sorted(by_name.items(), key=lambda item: -item[1])[:LARGEST]
    return {
        "count": len(computing),
        "ms": sum(us for _, us in computing) / 1e3,
        "copies_ms": sum(us for name, us in events if name.startswith(COPIES)) / 1e3,
        "largest": {name: us / 1e3 for name, us in largest},
    }
