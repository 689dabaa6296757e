"""Three GPTs that an H200 has trained: what is planned at the peak that a checkpoint per layer had there.

`python benchmarks/pareto.py --h200` prints it. The device is a pretended one (tests/cuda_codegen), the rates are those
that `ssd-fx calibrate` found on the H200, and what leaves goes to host memory, as with engine "memory".
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import train_gpt  # neighbours of this file
from forecasts import Figure, limit, of_rival, ours
from rivals import Rival, per_layer
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ssd_fx.rivals import CHECKPOINT

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the pretended device is that of the tests

# By name, since what they import has another name here: the example is `train_gpt`, and there `examples.train_gpt`.
plans, pretend, models, process = (
    importlib.import_module(f"tests.cuda_codegen.{name}") for name in ("plans", "pretend", "models", "process")
)

MACHINE = ROOT / "docs" / "results" / "gpu" / "2026-11-27-nvidia-h200-machine-1b439be.json"
GIB = 2**30
SEQ, DROPOUT = 1024, 0.1


@dataclass(frozen=True)
class Trained:
    """`peak_gib`, `checkpoint`: measured with a checkpoint per layer, its step to plain Inductor's. `goal`: of ours at
    that peak. `autocast`: the weights are in float32."""

    layers: int
    width: int
    heads: int
    batch: int
    peak_gib: float
    checkpoint: float
    goal: float
    autocast: bool = False

    def model(self) -> nn.Module:
        """On the pretended device; to be called under the mode of the fake tensors."""
        torch.set_default_dtype(torch.float32 if self.autocast else torch.bfloat16)
        model = train_gpt.GPT(train_gpt.Shape(self.layers, self.width, self.heads, SEQ, DROPOUT))
        torch.set_default_dtype(torch.float32)
        for block in model.blocks:
            block.attention = models.Flash(block.attention)
        pretend.move(model)
        return model


TRAINED = (
    Trained(6, 4096, 32, 16, 5.76, 1.25, 1.04),
    Trained(12, 768, 12, 8, 0.67, 1.37, 1.2, autocast=True),
    Trained(3, 8192, 64, 16, 10.1, 1.18, 1.01),
)


def planned(of: Trained, machine: Mapping[str, Any]) -> tuple[Figure, Figure, Figure | None]:
    """Everything kept, a checkpoint per layer, and ours at the peak that the latter had."""
    fake, folds = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), "joint_graph_constant_folding"
    with fake, inductor_config.patch({folds: False}), ExitStack() as stack:  # to fold it computes on the device
        stack.enter_context(functorch_config.patch(graphsafe_rng_functionalization=False))  # wants a generator
        if of.autocast:
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        text = torch.empty(of.batch, SEQ, dtype=torch.int64, device=pretend.DEVICE)
        inputs: tuple[Tensor, Tensor] = (text, torch.empty_like(text))
        more = {"engine": "memory"}
        keep, ours_there = (
            *ours((of.model(), inputs), [1.0], machine, recompute=False, more=more),
            *ours((of.model(), inputs), [limit(of.peak_gib * GIB)], machine, more=more),
        )
        checkpoint = of_rival((of.model(), inputs), Rival(CHECKPOINT, per_layer), machine, more=more)
    assert keep is not None
    return keep, checkpoint, ours_there


def row(of: Trained, keep: Figure, checkpoint: Figure, found: Figure | None) -> str:
    to_keep = found.step_s / keep.step_s if found else math.inf
    cells = [f"{of.layers} x {of.width}", f"{keep.peak_bytes / GIB:.2f}", f"{keep.step_s * 1e3:.1f}"]
    cells += [f"{of.peak_gib}", f"{of.checkpoint}"]
    cells += [f"{checkpoint.peak_bytes / GIB:.2f}", f"{checkpoint.step_s / keep.step_s:.3f}"]
    cells += [f"{found.peak_bytes / GIB:.2f}" if found else "no plan", f"{to_keep:.3f}", f"{of.goal}"]
    return f"| {' | '.join([*cells, 'met' if to_keep <= of.goal else 'MISSED'])} |"


def report() -> int:
    """Prints the table; 1 if a goal is missed."""
    lines = process.pretending("h200", [], os.environ)
    print(*lines, sep="\n")
    return int(any("MISSED" in line for line in lines))


def main() -> None:
    pretend.device()
    torch.set_float32_matmul_precision("high")  # else Inductor warns
    head: tuple[str, ...] = ("layers x width", "keep all: GiB", "ms", "checkpoint measured: GiB", "to keep all")
    head += ("predicted: GiB", "to keep all", "ours there: GiB", "to keep all", "goal", "")
    print(f"| {' | '.join(head)} |", "|" + "---|" * len(head), sep="\n")
    machine = plans.rates(MACHINE)
    for each in TRAINED:
        print(row(each, *planned(each, machine)), flush=True)


if __name__ == "__main__":
    main()
