"""Trains cases as CUDA code and prints a line of JSON, a `Trained`, for each engine and order of the device.

python -m tests.cuda_values.run --engines memory,kvikio --orders lazy,1 [--plant FAULT] CASE...   # by process.py
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor.codegen.triton import TritonOverrides

import ssd_fx
from tests.bitwise import differences
from tests.cuda_values import cuda_names
from tests.cuda_values.cases import AGAIN, CASES, OPTIONS, RANDOM
from tests.cuda_values.engines import ENGINES, SETTLED, Engine, kept
from tests.cuda_values.late_gpu import installed
from tests.cuda_values.plants import PLANTS
from tests.cuda_values.results import Trained
from tests.cuda_values.step import Compiled, compiled, eager, train
from tests.rates import QUICK

ALL = {"engine": "memory", "min_bytes": 0, "budget": 0, "machine": QUICK, "recompute": False}
Order = str | int


@dataclass(frozen=True)
class Job:
    model: nn.Module
    inputs: Sequence[Tensor]
    steps: int


def results(name: str, engines: Sequence[str], orders: Sequence[Order], steps: int) -> Iterator[Trained]:
    """Of one case: first with everything kept, then through every engine in every order."""
    torch.manual_seed(0)
    job = Job(*CASES[name](), steps)
    graphs = compiled(job.model, job.inputs, ALL | OPTIONS.get(name, {}))
    found, bits = trained(job, graphs, kept, "compute first")
    if name in RANDOM:
        with mock.patch.object(TritonOverrides, "_can_use_4x_random", _no) if name in AGAIN else nullcontext():
            plain = compiled(job.model, job.inputs, None)
        _, expected = trained(job, plain, kept, "compute first")
    else:
        expected = eager(job.model, job.inputs, steps)
    yield replace(found, case=name, engine="kept", apart=apart(bits, expected), same_bits=True)
    for engine in engines:
        for order in orders:
            found, seen = trained(job, graphs, ENGINES[engine], order, settled=engine in SETTLED)
            same = differences(seen, bits) == {}
            yield replace(found, case=name, engine=engine, apart=apart(seen, expected), same_bits=same)


def _no() -> bool:
    return False


def trained(
    job: Job, graphs: Compiled, engine: Engine, order: Order, *, settled: bool = False
) -> tuple[Trained, list[Tensor]]:
    """What `train` returns, and what happened; of a step that raised the error, and no values."""
    seen: list[Tensor] = []
    error = ""
    ssd_fx.reset_stats()
    with tempfile.TemporaryDirectory() as directory, installed(order) as gpu, engine(gpu, directory) as config:
        try:
            seen = train(gpu, replace(graphs, config=config), job.model, job.inputs, job.steps, settled=settled)
        except (RuntimeError, OSError, AssertionError) as raised:
            error = repr(raised)
    stats = ssd_fx.stats()
    kernels = sum(n for name, n in gpu.launched.items() if name.startswith("triton_"))
    found = Trained(
        "", "", str(order), stores=stats.stores, read=stats.read_bytes, forwarded=stats.forwarded_bytes,
        kernels=kernels, calls=gpu.launched.total() - kernels, violations=tuple(gpu.violations[:3]), error=error,
    )  # fmt: skip
    return found, seen


def apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference as a share of the largest value of its tensor; infinite where they cannot be compared."""
    if len(found) != len(expected):
        return float("inf")
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(found, expected, strict=True) if x.numel()]
    shares = [float((x - y).abs().max() / y.abs().max().clamp_min(1e-3)) for x, y in pairs]
    return max(shares) if all(share == share for share in shares) else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--engines", required=True)
    parser.add_argument("--orders", required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plant", choices=list(PLANTS))
    flags = parser.parse_args()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    cuda_names.install()
    if flags.plant:
        PLANTS[flags.plant]()
    orders: list[Any] = [int(order) if order.isdigit() else order for order in flags.orders.split(",")]
    for case in flags.cases:
        for found in results(case, flags.engines.split(","), orders, flags.steps):
            print(found.line(), flush=True)


if __name__ == "__main__":
    main()
