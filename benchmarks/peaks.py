"""The peak that the planner predicts, beside the peak that the allocator saw, for many graphs; the worst row is last.

python benchmarks/peaks.py --dir /mnt/nvme                               # every model, budget 0 and "auto"
python benchmarks/peaks.py --dir /mnt/nvme --models logits gpt --budgets 0
python benchmarks/peaks.py --dir /mnt/nvme --models gpt llama --budgets 0.5 --gbps 0.2    # the drive is held to a rate

How it is measured:
- The peak is that of live tensors (peak.py) above the level before the step, the highest of the measured steps. The
  counter is not part of ssd_fx and knows nothing of its nodes. The gradients that a backward makes lie above the level.
- A step makes its inputs, and drops them when the forward returns. So they count as the plan counts those that it can
  store. The level has the parameters.
- "Inside": the graph returns its loss. "Outside": it returns what the loss would be made of, whose gradient is there
  before the step.
- Plans are made with the default rates, as if no drive were slow. A tensor that is handed over stays until it is
  written, in the plan as long as predicted. So a drive that is slower than these rates shows here too. With `--gbps`
  the planner is told the rate that the drive is held to (held.py), and not that this machine computes faster.
- The limit is what the budget allows. A plan may stay below it.
- The error is (predicted - measured) / measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from os import environ
from pathlib import Path
from typing import Any
from unittest import mock

import families  # neighbours of this file
import held
import images
import ordinary
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
from tests.passes import toys  # found through held.py

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
# Those of the tests that have no size in them, each named for its hazard.
HAZARDS: tuple[Callable[..., Any], ...] = (
    toys.non_contiguous, toys.tied_weight, toys.saved_output, toys.view_of_output, toys.half_precision, toys.rounded,
    toys.complex_numbers, toys.lazy_negative, toys.real_view, toys.dtype_view, toys.float8, toys.saved_twice,
    toys.equal_copy, toys.changed_copy,
)  # fmt: skip
HAZARD_WIDTH = 1024
# Models of the tests' zoo that need nothing but transformers, larger than there: beside tensors of a few KiB, what
# direct I/O is aligned with would be most of the error.
ZOO = ("Llama", "BART", "ViT", "Swin")
ZOO_SIZES = {"WIDTH": 256, "INNER": 1024, "LENGTH": 256, "VOCABULARY": 1024, "IMAGE": 256}


class ToyModel(nn.Module):
    """A toy and its weight."""

    def __init__(self, toy: Toy, width: int = TOY_WIDTH) -> None:
        super().__init__()
        self.toy = toy
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

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


class Rotating(nn.Module):
    """Layers of a Llama, without embedding and head."""

    def __init__(self, model: families.Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        for block in self.model.blocks:
            x = block(x, self.model.cos, self.model.sin)
        return x


class Conv(nn.Module):
    """A small residual network of images, with batch norms and a pooling, and its head."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
                *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.first(x))
        for block in self.blocks:
            x = (x + block(x)).relu()
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@dataclass(frozen=True)
class Graph:
    """What is compiled, its inputs, and what must have no gradients before a step."""

    run: Callable[..., Any]
    inputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # its forward


@dataclass(frozen=True)
class Row:
    """One graph under one budget, in bytes. `gbps`: the rate of a drive that is held to one, else 0."""

    name: str
    budget: float | str
    predicted: int
    measured: int
    limit: float
    gbps: float = 0.0

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured

    def __str__(self) -> str:
        flag = "" if abs(self.error) <= TOLERANCE else f"  beyond {TOLERANCE:.0%}"
        figures = f"{self.predicted / MIB:>10.1f}{self.measured / MIB:>10.1f}{self.error:>+9.1%}"
        return f"{self.name:24}{self.budget!s:>7}{figures}{self.limit / MIB:>10.1f}{flag}"

    @property
    def cells(self) -> str:
        """As a row of Markdown."""
        sizes = (f"{nbytes / MIB:.1f}" for nbytes in (self.predicted, self.measured, self.limit))
        error = f"{self.error:+.1%}" if abs(self.error) <= TOLERANCE else f"**{self.error:+.1%}**"
        return f"| {' | '.join((self.name, str(self.budget), *sizes, error))} |"


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def _module(model: nn.Module, x: Tensor, targets: Tensor, inside: bool) -> Graph:
    if not inside:
        return Graph(model, (x,), list(model.parameters()))
    return Graph(lambda x, y: _loss(model(x), y), (x, targets), list(model.parameters()))


def _family(family: families.Family, *, half: bool = False) -> Graph:
    model = families.make(family, SHAPE, train_gpt.VOCABULARY)
    around = partial(torch.autocast, "cpu", torch.bfloat16) if half else nullcontext
    return Graph(model, next(families.batches(family, BATCH, SHAPE.seq, 0)), list(model.parameters()), around)


def _toy(toy: Toy, rows: int = TOY_ROWS, width: int = TOY_WIDTH) -> Graph:
    model = ToyModel(toy, width)
    return Graph(model, (torch.randn(rows, width),), list(model.parameters()))


def _blocks(family: families.Family) -> Graph:
    """The layers without embedding and head."""
    layers: nn.Module
    if family == "llama":
        layers = Rotating(families.Llama(SHAPE, 2))
        parameters = list(layers.model.blocks.parameters())
    else:
        layers = nn.Sequential(*(families.Layer(SHAPE, causal=family == "gpt") for _ in range(SHAPE.layers)))
        parameters = list(layers.parameters())
    return Graph(layers, (torch.randn(BATCH, SHAPE.seq, SHAPE.width),), parameters)


def _head(inside: bool) -> Graph:
    return _module(Head(), torch.randn(8192, 512), torch.randint(0, 8192, (8192,)), inside)


def _vit(inside: bool) -> Graph:
    model, pixels, classes = images.ViT(SHAPE), torch.randn(BATCH, 3, 256, 256), torch.randint(0, 1000, (BATCH,))
    nn.init.normal_(model.positions, std=0.02)
    if inside:
        return Graph(model, (pixels, classes), list(model.parameters()))
    embedded = torch.randn(BATCH, SHAPE.seq, SHAPE.width)
    return Graph(nn.Sequential(*model.blocks, model.norm), (embedded,), list(model.blocks.parameters()))


def _unet(inside: bool) -> Graph:
    model, noisy = images.UNet(64, 1), torch.randn(4, images.NOISE, 64, 64)
    if inside:
        return Graph(model, (noisy, torch.randn_like(noisy)), list(model.parameters()))
    return Graph(lambda x: model.levels(model.first(x)), (noisy,), list(model.parameters()))


def _ordinary(make: Callable[[], ordinary.Made]) -> Graph:
    model, run, inputs = make()
    return Graph(run, inputs, [p for p in model.parameters() if p.requires_grad])


def _conv(inside: bool) -> Graph:
    return _module(Conv(), torch.randn(8, 3, 128, 128), torch.randint(0, 1000, (8,)), inside)


def _zoo(name: str) -> Graph:
    from tests.zoo import models

    with mock.patch.dict(vars(models), ZOO_SIZES):
        case = models.MODELS[name](0.1)
    case.model.train()
    names = list(case.inputs)
    flags = {key: value for key, value in case.inputs.items() if not isinstance(value, Tensor)}

    def run(*tensors: Tensor) -> Any:
        given = dict(zip([name for name in names if name not in flags], tensors, strict=True))
        return case.loss(case.model(**given, **flags))

    inputs = [value for value in case.inputs.values() if isinstance(value, Tensor)]
    return Graph(run, inputs, list(case.model.parameters()))


MODELS: Mapping[str, Callable[[], Graph]] = {
    "logits": lambda: _head(True),
    "logits, outside": lambda: _head(False),
    "gpt": lambda: _family("gpt"),
    "gpt, bf16": lambda: _family("gpt", half=True),
    "gpt layers, outside": lambda: _blocks("gpt"),
    "llama": lambda: _family("llama"),
    "llama, bf16": lambda: _family("llama", half=True),
    "llama layers, outside": lambda: _blocks("llama"),
    "bert": lambda: _family("bert"),
    "bert layers, outside": lambda: _blocks("bert"),
    "t5": lambda: _family("t5"),
    "vit": lambda: _vit(True),
    "vit layers, outside": lambda: _vit(False),
    "unet": lambda: _unet(True),
    "unet, outside": lambda: _unet(False),
    "resnet": lambda: _conv(True),
    "resnet, outside": lambda: _conv(False),
    **{f"zoo {name}": partial(_zoo, name) for name in ZOO},
    **{name: partial(_toy, toy) for name, toy in TOYS.items()},
    **{name: partial(_ordinary, make) for name, make in ordinary.MODELS.items()},
    **{toys.name(toy).replace("_", " "): partial(_toy, toy, HAZARD_WIDTH, HAZARD_WIDTH) for toy in HAZARDS},
}


def measure(name: str, budget: float | str, directory: str, gbps: float = 0.0) -> Row:
    """Compiles the graph, and runs its steps. `gbps`: what the drive is held to; 0 for what it is."""
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
        if gbps:
            options |= {"engine": held.NAME, "machine": {"write_bw": gbps * 1e9, "read_bw": gbps * 1e9}}
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
        plan = predicted.read(Path(dump))
        return Row(name, budget, plan.peak_bytes, highest, plan.limit_bytes, gbps)


def _step(compiled: Callable[..., Any], graph: Graph, gradients: list[Tensor]) -> list[Tensor]:
    """Forward and backward. Returns the gradients of the outputs for the next step."""
    with graph.around():
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
    add("--gbps", type=float, default=0.0, help="hold the drive to so many GB/s each way, and tell the planner")
    add("--json", type=Path, help="where the rows are, so that a second run goes on where the first ended")
    add("--again", action="store_true", help="measure what is there, too")
    add("--markdown", type=Path, help="where to write the table")
    return parser.parse_args(arguments)


def known(path: Path | None) -> dict[tuple[str, float | str, float], Row]:
    """The rows of earlier runs."""
    if path is None or not path.exists():
        return {}
    rows = [Row(**row) for row in json.loads(path.read_text())["rows"]]
    return {(row.name, row.budget, row.gbps): row for row in rows}


def markdown(rows: Sequence[Row]) -> str:
    """The worst row is first."""
    head = "| model | budget | predicted, MiB | measured, MiB | limit, MiB | error |\n|---|---|---|---|---|---|"
    return "\n".join((head, *(row.cells for row in sorted(rows, key=lambda row: -abs(row.error))))) + "\n"


def main() -> None:
    if not peak.is_preloaded():
        command = [sys.executable, *sys.argv]
        raise SystemExit(subprocess.run(command, env=environ | peak.environment(), check=False).returncode)
    flags = parse_flags(sys.argv[1:])
    where = announce(flags.dir)
    if flags.gbps:
        held.register(flags.gbps)
    rows = known(flags.json)
    for name, budget in product(flags.models, flags.budgets):
        key = (name, budget, flags.gbps)
        if flags.again or key not in rows:
            rows[key] = measure(name, budget, flags.dir, flags.gbps)
            if flags.json:
                write_json(flags.json, {"system": where, "rows": [asdict(row) for row in rows.values()]})
        print(rows[key], flush=True)
    asked = [rows[name, budget, flags.gbps] for name, budget in product(flags.models, flags.budgets)]
    print(f"\n{'':31}{'predicted':>10}{'measured':>10}{'error':>9}{'limit':>10}   MiB")
    print(*sorted(asked, key=lambda row: abs(row.error)), sep="\n")
    if flags.markdown:
        flags.markdown.write_text(markdown(asked))


if __name__ == "__main__":
    main()
