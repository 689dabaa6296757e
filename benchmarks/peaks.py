"""The peak that the planner predicts, beside the peak that the allocator saw, for many graphs; the worst row is last.

python benchmarks/peaks.py --dir /mnt/nvme                               # every model, budget 0 and "auto"
python benchmarks/peaks.py --dir /mnt/nvme --models logits gpt --budgets 0

How it is measured:
- The peak is that of live tensors (peak.py) above the level before the step, the highest of the measured steps. The
  counter is not part of ssd_fx and knows nothing of its nodes. The gradients that a backward makes lie above the level.
- A step makes its inputs, and drops them when the forward returns. So they count as the plan counts those that it can
  store. The level has the parameters.
- "Inside": the graph returns its loss. "Outside": it returns what the loss would be made of, whose gradient is there
  before the step.
- Plans are made with the default rates, as if no drive were slow. A tensor that is handed over stays until it is
  written, in the plan as long as predicted. So a drive that is slower than these rates shows here too.
- The error is (predicted - measured) / measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import families  # neighbours of this file
import peak
import predicted
import torch
from families import train_gpt
from system import MIB, announce, write_json
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import ssd_fx
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

TOLERANCE = 0.05
WARMUP, STEPS = 3, 3
SHAPE = train_gpt.Shape(layers=2, width=256, heads=4, seq=256, dropout=0.1)
BATCH = 8
TOY_ROWS, TOY_WIDTH = 2048, 512
Toy = Callable[[Tensor, Tensor], Tensor]
TOYS: dict[str, Toy] = {
    "relu chain": lambda x, w: ((x @ w).relu() @ w).relu(),
    "tanh chain": lambda x, w: (((x @ w).tanh() @ w).tanh() @ w).tanh(),
    "gelu": lambda x, w: F.gelu(x @ w) @ w,
    "gated": lambda x, w: (F.silu(x @ w) * (x @ w.t())) @ w,
    "normed": lambda x, w: F.layer_norm(x @ w, (TOY_WIDTH,)) @ w,
    "softmax": lambda x, w: (x @ w).softmax(-1) @ w,
    "residual": lambda x, w: x + (x + (x @ w).sigmoid() @ w).sigmoid() @ w,
    "dropout": lambda x, w: F.dropout((x @ w).exp(), 0.5) @ w,
    "bfloat16": lambda x, w: ((x.bfloat16() @ w.bfloat16()).tanh() @ w.bfloat16()).float(),
    "two readers": lambda x, w: (x @ w).sin() @ w + (x @ w) @ w.t(),
    "slices": lambda x, w: torch.cat([h.exp() * (i + 1) for i, h in enumerate((x @ w).chunk(4, dim=1))], dim=1) @ w,
    "cross entropy": lambda x, w: F.cross_entropy(x @ w, torch.zeros(len(x), dtype=torch.int64)),
}


class ToyModel(nn.Module):
    """A toy and its weight."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        self.toy = toy
        self.weight = nn.Parameter(torch.randn(TOY_WIDTH, TOY_WIDTH) / TOY_WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.toy(x, self.weight)


class Head(nn.Module):
    """A few layers and the words of a large head, the loss of which is most of the memory."""

    def __init__(self, width: int = 512, words: int = 8192) -> None:
        super().__init__()
        self.body = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class ViT(nn.Module):
    """Patches of an image, encoder layers, the mean of what they make."""

    def __init__(self, shape: train_gpt.Shape, patch: int = 16, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, patch)
        self.positions = nn.Parameter(torch.randn(shape.seq, shape.width) * 0.02)
        self.blocks = nn.ModuleList(families.Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


@dataclass(frozen=True)
class Graph:
    """What is compiled, its inputs, and what must have no gradients before a step."""

    run: Callable[..., Any]
    inputs: Sequence[Tensor]
    leaves: Sequence[Tensor]


@dataclass(frozen=True)
class Row:
    """One graph under one budget, in bytes."""

    name: str
    budget: float | str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured

    def __str__(self) -> str:
        flag = "" if abs(self.error) <= TOLERANCE else f"  beyond {TOLERANCE:.0%}"
        figures = f"{self.predicted / MIB:>10.1f}{self.measured / MIB:>10.1f}{self.error:>+9.1%}"
        return f"{self.name:24}{self.budget!s:>7}{figures}{flag}"


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def _module(model: nn.Module, x: Tensor, targets: Tensor, inside: bool) -> Graph:
    if not inside:
        return Graph(model, (x,), list(model.parameters()))
    return Graph(lambda x, y: _loss(model(x), y), (x, targets), list(model.parameters()))


def _family(family: families.Family) -> Graph:
    model = families.make(family, SHAPE, train_gpt.VOCABULARY)
    return Graph(model, next(families.batches(family, BATCH, SHAPE.seq, 0)), list(model.parameters()))


def _toy(toy: Toy) -> Graph:
    model = ToyModel(toy)
    return Graph(model, (torch.randn(TOY_ROWS, TOY_WIDTH),), list(model.parameters()))


def _blocks(family: families.Family) -> Graph:
    """The layers without embedding and head."""
    layers = nn.Sequential(*(families.Layer(SHAPE, causal=family == "gpt") for _ in range(SHAPE.layers)))
    return Graph(layers, (torch.randn(BATCH, SHAPE.seq, SHAPE.width),), list(layers.parameters()))


def _head(inside: bool) -> Graph:
    return _module(Head(), torch.randn(8192, 512), torch.randint(0, 8192, (8192,)), inside)


def _vit(inside: bool) -> Graph:
    images, classes = torch.randn(BATCH, 3, 256, 256), torch.randint(0, 1000, (BATCH,))
    return _module(ViT(SHAPE), images, classes, inside)


MODELS: dict[str, Callable[[], Graph]] = {
    "logits": lambda: _head(True),
    "logits, outside": lambda: _head(False),
    "gpt": lambda: _family("gpt"),
    "gpt layers, outside": lambda: _blocks("gpt"),
    "bert": lambda: _family("bert"),
    "bert layers, outside": lambda: _blocks("bert"),
    "t5": lambda: _family("t5"),
    "vit": lambda: _vit(True),
    "vit, outside": lambda: _vit(False),
} | {name: partial(_toy, toy) for name, toy in TOYS.items()}


def measure(name: str, budget: float | str, directory: str) -> Row:
    """Compiles the graph, and runs its steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    graph, counter = MODELS[name](), peak.Peak()
    with tempfile.TemporaryDirectory(dir=directory) as files, tempfile.TemporaryDirectory() as dump:
        options: dict[str, Any] = {
            "budget": budget,
            "dirs": [files],
            "dump": dump,
            "machine": "default",
            "min_bytes": 0,
        }
        compiled = torch.compile(graph.run, backend=ssd_fx.backend, options=options)
        highest = 0
        gradients: list[Tensor] = []
        for step in range(WARMUP + STEPS):
            if step == 1:
                CPU_ALLOCATOR.observe(counter.address)  # it is there from the first load on
            with counter:
                gradients = _step(compiled, graph, gradients)
            highest = max(highest, counter.peak_bytes if step >= WARMUP else 0)
            for leaf in graph.leaves:
                leaf.grad = None
        return Row(name, budget, predicted.read(Path(dump)).peak_bytes, highest)


def _step(compiled: Callable[..., Any], graph: Graph, gradients: list[Tensor]) -> list[Tensor]:
    """Forward and backward. Returns the gradients of the outputs for the next step."""
    found = compiled(*(x.clone() for x in graph.inputs))
    outputs = [o for o in (found if isinstance(found, tuple) else (found,)) if o.requires_grad]
    gradients = gradients or [torch.ones_like(o) for o in outputs]
    edges = [get_gradient_edge(o) for o in outputs]
    del found, outputs  # nobody keeps an output, as with a loss of the outputs
    torch.autograd.backward(edges, gradients)
    return gradients


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", default=tempfile.gettempdir(), help="where the files lie, default %(default)s")
    add("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    add("--budgets", nargs="+", type=lambda b: b if b == "auto" else float(b), default=[0.0, "auto"])
    add("--json", help="where to write the rows")
    return parser.parse_args(arguments)


def main() -> None:
    if not peak.is_preloaded():
        command = [sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env=environ | peak.environment(), check=False).returncode)
    flags = parse_flags(sys.argv[1:])
    where = announce(flags.dir)
    rows = []
    for name in flags.models:
        for budget in flags.budgets:
            rows.append(measure(name, budget, flags.dir))
            print(rows[-1], flush=True)
    print(f"\n{'':31}{'predicted':>10}{'measured':>10}{'error':>9}   MiB")
    print(*sorted(rows, key=lambda row: abs(row.error)), sep="\n")
    if flags.json:
        write_json(flags.json, {"system": where, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
