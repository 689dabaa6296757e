"""Steps of a small GPT, trained in one of several ways; run as a script, it makes one for every line on stdin.

How it is measured:
- The step time is forward, backward and optimizer. The peak is that of forward and backward, in live CPU tensor bytes
  above the level before the step (memtrack.c: exact, all threads). The weights, AdamW's state and the gradients that
  the warm-up left (`zero_grad(set_to_none=False)`) lie below that level; the gradients that a backward makes, before
  they are added to those, lie above it.
- Tensors of ssd_fx's allocator are mmap'ed and not seen by that count. The allocator reports them itself.
- CPU time is that of the process, all its threads; the I/O threads' part of it is given too, from /proc/self/task.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the model is the example's

import peak  # noqa: E402 - a neighbour of this file
import torch  # noqa: E402 - with the lines around it
import train_gpt as train_gpt  # noqa: E402 - found through the path above; the benchmarks take it from here
from moved import Moved  # noqa: E402 - a neighbour of this file
from system import io_cpu_s, reset_resident_peak, resident_bytes, resident_peak_bytes  # noqa: E402 - a neighbour of this file
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

Way = Literal["inductor", "recompute", "checkpoint", "ssd_fx"]


@dataclass(frozen=True)
class Model:
    """The example's GPT and its data."""

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    dropout: float
    amp: bool
    seed: int
    lr: float

    @staticmethod
    def of(flags: argparse.Namespace) -> Model:
        return Model(**{each.name: getattr(flags, each.name) for each in fields(Model)})

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, width {self.width}, {self.heads} heads, dropout {self.dropout}, "
            f"batch {self.batch} x {self.seq} bytes, {'bfloat16 autocast' if self.amp else 'float32'}"
        )


@dataclass(frozen=True)
class Task:
    """What a worker trains, and how.

    `way`: "inductor"; "recompute": Inductor with torch's own solver under `budget`, a share from 0 to 1;
    "checkpoint": Inductor, every block under torch.utils.checkpoint; "ssd_fx" with `options`. `preload`: a library with
    another malloc.
    """

    model: Model
    way: Way
    budget: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    preload: str = ""

    @staticmethod
    def read(text: str) -> Task:
        given = json.loads(text)
        return Task(**(given | {"model": Model(**given["model"])}))


@dataclass(frozen=True)
class Step(Moved):
    """One training step of one worker. Fields after `loss` are 0 where the way has no such thing.

    `peak_bytes`: live tensors, those that loads fill included. `graph_s`: forward and backward, without the optimizer.
    `write_stall_s`: waited in stores and releases; `read_stall_s`: waited for loads. `resident_peak_bytes`: the most
    memory that the process had in the step (VmHWM); `resident_before_bytes`: what it had before its first step.
    """

    time_s: float
    graph_s: float
    cpu_s: float
    io_cpu_s: float | None  # None: no thread has the name
    peak_bytes: int
    loss: float
    write_stall_s: float = 0.0
    read_stall_s: float = 0.0
    disk_bytes: int = 0
    resident_peak_bytes: int = 0
    resident_before_bytes: int = 0


class Checkpointed(nn.Module):
    """A block whose inner activations are computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def compiled(model: train_gpt.GPT, task: Task) -> Any:
    """The model, to be compiled at its first call in the task's way."""
    if task.way == "ssd_fx":
        import ssd_fx

        return torch.compile(model, backend=ssd_fx.backend, options=dict(task.options))
    if task.way == "recompute":
        torch._functorch.config.activation_memory_budget = task.budget
    if task.way == "checkpoint":
        model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    return torch.compile(model, backend="inductor")


def train(task: Task) -> Iterator[Step]:
    """Endless steps of `task`."""
    about = task.model
    torch.manual_seed(about.seed)
    model = train_gpt.GPT(train_gpt.Shape(about.layers, about.width, about.heads, about.seq, about.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=about.lr)
    forward = compiled(model, task)
    tracker = peak.Peak()
    if task.way == "ssd_fx":
        from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

        CPU_ALLOCATOR.observe(tracker.address)
    before = resident_bytes()
    for inputs, targets in train_gpt.batches(about.batch, about.seq, about.seed):
        optimizer.zero_grad(set_to_none=False)
        _reset(task)
        reset_resident_peak()
        start, cpu, io_cpu = time.perf_counter(), time.process_time(), io_cpu_s()
        with tracker as memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=about.amp):
                loss = forward(inputs, targets)
            loss.backward()
        graph_s = time.perf_counter() - start
        optimizer.step()
        figures: dict[str, Any] = {"time_s": time.perf_counter() - start, "graph_s": graph_s}
        io_end = io_cpu_s()
        figures |= {"cpu_s": time.process_time() - cpu}
        figures |= {"io_cpu_s": None if io_end is None else io_end - (io_cpu or 0.0)}
        figures |= {"peak_bytes": memory.peak_bytes, "loss": loss.item()}
        figures |= {"resident_peak_bytes": resident_peak_bytes(), "resident_before_bytes": before}
        del loss
        yield Step(**figures, **_offloading(task, start))


def _reset(task: Task) -> None:
    if task.way == "ssd_fx":
        import ssd_fx

        ssd_fx.reset_stats()


def _offloading(task: Task, since: float) -> dict[str, Any]:
    """What ssd_fx did since `_reset`, which was at `since`, under the names of `Step`."""
    if task.way != "ssd_fx":
        return {}
    from ssd_fx.runtime import trace

    found = Step.figures(train_gpt.stats())
    waited = sum(e.ended - e.started for e in trace.events() if e.kind == "wait" and e.started >= since)
    read = min(waited, found["stall_s"])
    return found | {"read_stall_s": read, "write_stall_s": found["stall_s"] - read}


def work(task: Task) -> None:
    """Answer every line on stdin with a step, as one line of JSON on stdout."""
    os.environ.pop("LD_PRELOAD", None)  # compilers that are started from here need no tracker
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print must not mix with the answers
    steps = train(task)
    for _ in sys.stdin:
        print(json.dumps(asdict(next(steps))), file=answers)


if __name__ == "__main__":
    work(Task.read(sys.argv[1]))
