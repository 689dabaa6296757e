"""How fast an engine moves device memory: the first half of gpu.py."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from system import io_cpu_s

from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.engines.base import Engine, Memory
from ssd_fx.runtime.engines.registry import make_engine

MIB = 2**20
ROUNDS = 4


@dataclass(frozen=True)
class Bandwidth:
    """Rates in MB/s (10**6 B/s): the median of the rounds, and the slowest and the fastest.

    `cpu_s_per_gb`: of the I/O threads, waiting included; None for an engine that has none.
    """

    engine: str
    size_mib: int
    write: tuple[float, float, float]
    read: tuple[float, float, float]
    cpu_s_per_gb: float | None = None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(name: str, size: int, flags: argparse.Namespace) -> Bandwidth:
    """What is read is compared with what was written. Raises: SystemExit if it differs."""
    device = torch.device(flags.device)
    engine = make_engine(RuntimeConfig(dirs=(flags.dir,), engine=name, allow_tmpfs=flags.allow_tmpfs))
    try:
        sources = [torch.full((size,), i % 251, dtype=torch.uint8, device=device) for i in range(flags.total // size)]
        targets = [torch.zeros_like(source) for source in sources]
        one_round(engine, sources, targets, device)  # the file grows, and threads and streams are made
        before = io_cpu_s()
        rounds = [one_round(engine, sources, targets, device) for _ in range(ROUNDS - 1)]
        after = io_cpu_s()
    finally:
        engine.close()
    if not all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True)):
        raise SystemExit(f"engine {name} read other bytes than it wrote")
    moved = len(sources) * size
    columns = [sorted(moved / 1e6 / seconds for seconds in column) for column in zip(*rounds, strict=True)]
    write, read = ((statistics.median(r), r[0], r[-1]) for r in columns)
    cpu = None if before is None or after is None else (after - before) / (2 * len(rounds) * moved / 1e9)
    return Bandwidth(name, size // MIB, write, read, cpu)


def one_round(
    engine: Engine, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], device: torch.device
) -> tuple[float, float]:
    """Seconds to write all, and to read all."""
    extents = [engine.alloc(source.numel()) for source in sources]

    def run(make: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> float:
        synchronize(device)
        start = time.perf_counter()
        transfers = [make(extent, Memory.of(x)) for extent, x in zip(extents, tensors, strict=True)]
        for transfer in transfers:
            transfer.start()
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - start

    written, read = run(engine.write, sources), run(engine.read, targets)
    for extent in extents:
        engine.free(extent)
    return written, read
