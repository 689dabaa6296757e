"""Steps of a model, trained in one of several ways; run as a script, it makes one for every line on stdin.

How it is measured:
- The step time is forward, backward and optimizer. The peak is that of forward and backward, in live CPU tensor bytes
  above the level before the step (memtrack.c: exact, all threads). The weights, the optimizer's state and the gradients
  that the warm-up left (`zero_grad(set_to_none=False)`) lie below that level; the gradients that a backward makes,
  before they are added to those, lie above it.
- Tensors of ssd_fx's allocator are mmap'ed and not seen by that count. The allocator reports them itself.
- On a GPU the peak is that of PyTorch's allocator there, and times are taken when the GPU is done.
- CPU time is that of the process, all its threads; the I/O threads' part of it is given too, from /proc/self/task.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import families  # neighbours of this file
import peak
import torch
from families import Family
from families import train_gpt as train_gpt
from moved import Moved
from system import io_cpu_s, reset_resident_peak, resident_bytes, resident_peak_bytes
from turns import hold_memory
from ways import OURS, Way, compiled

Optimizer = Literal["adamw", "sgd"]


@dataclass(frozen=True)
class Model:
    """A model of a family, and its data."""

    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    dropout: float
    amp: bool
    seed: int
    lr: float
    family: Family = "gpt"
    vocabulary: int = train_gpt.VOCABULARY

    @staticmethod
    def of(flags: argparse.Namespace) -> Model:
        return Model(**{each.name: getattr(flags, each.name) for each in fields(Model) if hasattr(flags, each.name)})

    def __str__(self) -> str:
        kind = "" if self.family == "gpt" else f"{self.family}, "
        return (
            f"{kind}{self.layers} layers, width {self.width}, {self.heads} heads, dropout {self.dropout}, "
            f"batch {self.batch} x {self.seq} bytes, {'bfloat16 autocast' if self.amp else 'float32'}"
        )


@dataclass(frozen=True)
class Task:
    """What a worker trains, and how.

    `way`, `budget`, `options`: as in ways.py. `preload`: a library with another malloc. `micro`: batches of the model
    in a step, whose gradients add up. `without`: a part of ssd_fx that is switched off (paper/switches.py).
    `directory`: where hooks write. `limit_bytes`: what the process may have of private memory (0: anything).
    `held_gbps`: the rate of the engine "held" (held.py), 0 where it is not used.
    """

    model: Model
    way: Way
    budget: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    preload: str = ""
    optimizer: Optimizer = "adamw"
    micro: int = 1
    without: str = ""
    directory: str = ""
    device: str = "cpu"
    limit_bytes: int = 0
    held_gbps: float = 0.0

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


def train(task: Task) -> Iterator[Step]:
    """Endless steps of `task`."""
    about = task.model
    torch.manual_seed(about.seed)
    shape = train_gpt.Shape(about.layers, about.width, about.heads, about.seq, about.dropout)
    model = families.make(about.family, shape, about.vocabulary).to(task.device)
    optimizer = _optimizer(task, model)
    forward, hooks = compiled(model, task.way, task.budget, task.options, task.directory)
    data = families.batches(about.family, about.batch, about.seq, about.seed)
    tracker = peak.on(task.device)
    if task.way in OURS and isinstance(tracker, peak.Peak):
        from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

        CPU_ALLOCATOR.observe(tracker.address)
        hold_memory()
    before = resident_bytes()
    while True:
        optimizer.zero_grad(set_to_none=False)
        _reset(task)
        reset_resident_peak()
        batches = [tuple(each.to(task.device) for each in next(data)) for _ in range(task.micro)]
        start, cpu, io_cpu = time.perf_counter(), time.process_time(), io_cpu_s()
        with tracker as memory:
            for inputs, targets in batches:
                with torch.autocast(task.device, torch.bfloat16, enabled=about.amp), hooks.around():
                    loss = forward(inputs, targets)
                (loss / task.micro).backward()
            peak.wait(task.device)
        graph_s = time.perf_counter() - start
        optimizer.step()
        peak.wait(task.device)
        figures: dict[str, Any] = {"time_s": time.perf_counter() - start, "graph_s": graph_s}
        io_end = io_cpu_s()
        figures |= {"cpu_s": time.process_time() - cpu}
        figures |= {"io_cpu_s": None if io_end is None else io_end - (io_cpu or 0.0)}
        figures |= {"peak_bytes": memory.peak_bytes, "loss": loss.item()}
        figures |= {"resident_peak_bytes": resident_peak_bytes(), "resident_before_bytes": before}
        del loss
        moved = _offloading(task, start) if task.way in OURS else {"written_bytes": hooks.written_bytes()}
        yield Step(**figures, **moved)


def _optimizer(task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if task.optimizer == "adamw" else torch.optim.SGD
    return kind(model.parameters(), lr=task.model.lr)


def _reset(task: Task) -> None:
    if task.way in OURS:
        import ssd_fx

        ssd_fx.reset_stats()


def _offloading(task: Task, since: float) -> dict[str, Any]:
    """What ssd_fx did since `_reset`, which was at `since`, under the names of `Step`."""
    from ssd_fx.runtime import trace

    found = Step.figures(train_gpt.stats())
    waited = sum(e.ended - e.started for e in trace.events() if e.kind == "wait" and e.started >= since)
    read = min(waited, found["stall_s"])
    return found | {"read_stall_s": read, "write_stall_s": found["stall_s"] - read}


def work(task: Task) -> None:
    """Answer every line on stdin with a step, as one line of JSON on stdout."""
    os.environ.pop("LD_PRELOAD", None)  # compilers that are started from here need no tracker
    if task.limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (task.limit_bytes, task.limit_bytes))
    if task.without:
        from paper import switches  # compiles what no cache may keep

        switches.off(task.without)
    if task.held_gbps:
        import held

        held.register(task.held_gbps)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print must not mix with the answers
    steps = train(task)
    for _ in sys.stdin:
        print(json.dumps(asdict(next(steps))), file=answers)


if __name__ == "__main__":
    work(Task.read(sys.argv[1]))
