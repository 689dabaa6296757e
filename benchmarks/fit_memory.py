"""Whether training stays within the option `memory`, how much of it is used, and what a tight limit costs.

python benchmarks/fit_memory.py --dir /mnt/nvme                        # a GPT of 12 layers under five limits
python benchmarks/fit_memory.py --dir /mnt/nvme --scene changes        # another batch, evaluation, a second model
python benchmarks/fit_memory.py --dir /mnt/nvme --scene blocks         # each block compiled by itself
python benchmarks/fit_memory.py --dir /mnt/nvme --quick                # small, in a few minutes
python benchmarks/fit_memory.py --dir /mnt/nvme --pytorch              # beside PyTorch's activation_memory_budget

How it is measured: a process for each limit, one step of each in turn. The peak is that of all live CPU tensors of the
process in a step, parameters, gradients and the optimizer's state included (memtrack.c, and what ssd_fx's allocator
reports). The limits lie between the peaks of `budget=0` and of Inductor, which run beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import families  # neighbours of this file
import peak
import torch
from families import train_gpt
from system import MIB, announce, write_json
from training import Model
from ways import Way, blocks, compiled

SCENES = ("steady", "blocks", "micro", "amp", "changes")
SHARES = (0.03, 0.25, 0.5, 0.75, 1.1)  # of the way from the peak of budget 0 to Inductor's
ENDS = 5  # steps that find these two peaks
PYTORCH = (0.1, 0.3, 0.5, 0.8)  # of its own budget
GROWS, SHRINKS, SECOND, EVALUATES, END = 20, 40, 50, 5, 60  # steps of the scene "changes"; a third of them if small


@dataclass(frozen=True)
class Job:
    """What one process trains. `limit`: bytes; 0 for none. `way`: "inductor", "recompute", "budget0" or "memory".

    `share`: PyTorch's `activation_memory_budget`, of the way "recompute".
    """

    model: Model
    scene: str
    way: str
    limit: int
    directory: str
    small: bool
    share: float = 1.0

    @property
    def ours(self) -> bool:
        return self.way in ("budget0", "memory")

    @staticmethod
    def read(text: str) -> Job:
        given = json.loads(text)
        return Job(**(given | {"model": Model(**given["model"])}))

    @property
    def pace(self) -> int:
        return 3 if self.small else 1

    @property
    def options(self) -> dict[str, Any]:
        own: dict[str, Any] = {"dirs": [self.directory]} | ({"min_bytes": 1 << 16} if self.small else {})
        return own | ({"memory": self.limit} if self.way == "memory" else {"budget": 0})


@dataclass(frozen=True)
class Step:
    """Bytes of all live tensors at the peak, seconds, the loss, and the bytes that stayed for the backward."""

    peak_bytes: int
    time_s: float
    loss: float
    stay_bytes: int
    written_bytes: int


def training(job: Job) -> Iterator[Step]:
    """Endless steps."""
    about, ours = job.model, job.ours
    tracker = peak.Peak()
    if ours:
        from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

        CPU_ALLOCATOR.observe(tracker.address)
    torch.manual_seed(about.seed)
    shape = train_gpt.Shape(about.layers, about.width, about.heads, about.seq, about.dropout)
    models = [_made(job, shape)]
    data = {
        size: families.batches(about.family, size, about.seq, about.seed) for size in {about.batch, 2 * about.batch}
    }
    number = 0
    while True:
        if job.scene == "changes" and number == SECOND // job.pace:
            models.append(_made(job, shape))
        larger = job.scene == "changes" and GROWS // job.pace <= number < SHRINKS // job.pace
        began = time.perf_counter()
        with tracker as memory:
            if job.scene == "changes" and number % EVALUATES == 0:
                with torch.no_grad():
                    models[0][0](*next(data[2 * about.batch]))
            for forward, optimizer in models:
                loss = _step(job, forward, optimizer, data[(2 if larger else 1) * about.batch])
        highest = memory.start_bytes + memory.peak_bytes
        number += 1
        yield Step(highest, time.perf_counter() - began, loss, *(_offloaded() if ours else (0, 0)))


def _made(job: Job, shape: train_gpt.Shape) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    model = families.make(job.model.family, shape, job.model.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.model.lr)
    if job.scene != "blocks":
        way: Way = "ssd_fx" if job.ours else "recompute"
        return compiled(model, way, job.share, job.options if job.ours else {}, "")[0], optimizer
    torch._functorch.config.activation_memory_budget = job.share
    for block in blocks(model):
        if job.ours:
            import ssd_fx

            block.compile(backend=ssd_fx.backend, options=job.options)
        else:
            block.compile()
    return model, optimizer


def _step(
    job: Job, forward: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, data: Iterator[Any]
) -> float:
    micro = 4 if job.scene == "micro" else 1
    for _ in range(micro):
        inputs, targets = next(data)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.scene == "amp"):
            loss = forward(inputs, targets)
        (loss / micro).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _offloaded() -> tuple[int, int]:
    import ssd_fx

    found = ssd_fx.stats()
    written = found.written_bytes
    ssd_fx.reset_stats()
    return found.memory_stay_bytes, written


def work(job: Job) -> None:
    """Answer every line on stdin with a step, as a line of JSON on stdout."""
    os.environ.pop("LD_PRELOAD", None)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    steps = training(job)
    for _ in sys.stdin:
        print(json.dumps(asdict(next(steps))), file=answers)


def run(jobs: Mapping[str, Job], steps: int) -> dict[str, list[Step]]:
    """The steps of every job, in turns."""
    found: dict[str, list[Step]] = {name: [] for name in jobs}
    with ExitStack() as stack:
        workers = {}
        for name, job in jobs.items():
            command = [sys.executable, __file__, "--work", json.dumps(asdict(job))]
            environment = os.environ | peak.environment()
            pipe = subprocess.PIPE
            worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment)
            workers[name] = stack.enter_context(worker)
        for _ in range(steps):
            for name, worker in workers.items():
                assert worker.stdin is not None
                assert worker.stdout is not None
                print(file=worker.stdin)
                line = worker.stdout.readline()
                if not line:
                    raise RuntimeError(f"the worker {name!r} has ended")
                found[name].append(Step(**json.loads(line)))
    return found


def row(name: str, steps: Sequence[Step], limit: int, warm: int) -> str:
    highest, used = max(s.peak_bytes for s in steps), max(s.peak_bytes for s in steps[warm:])
    seconds = median(s.time_s for s in steps[warm:])
    held = "" if not limit else "yes" if highest <= limit else f"NO, {(highest - limit) / MIB:.1f} MiB over"
    share = f"{used / limit:.1%}" if limit else ""
    figures = [f"{limit / MIB:.1f}" if limit else "", f"{highest / MIB:.1f}", held, share]
    figures += [f"{steps[-1].stay_bytes / MIB:.1f}", f"{steps[-1].written_bytes / MIB:.1f}", f"{seconds:.3f}"]
    return f"| {name} | " + " | ".join(figures) + " |"


def table(found: Mapping[str, Sequence[Step]], limits: Mapping[str, int], warm: int) -> str:
    head = (
        "| | limit, MiB | highest peak, MiB | held in every step | used | stays, MiB | written, MiB a step | step, s |"
    )
    rows = [row(name, steps, limits.get(name, 0), warm) for name, steps in found.items()]
    return "\n".join([head, "|---|" + "---|" * 7, *rows])


def over(found: Mapping[str, Sequence[Step]], limits: Mapping[str, int]) -> list[str]:
    """The steps above a limit."""
    return [
        f"{name}: step {i} took {step.peak_bytes / MIB:.1f} MiB"
        for name, limit in limits.items()
        for i, step in enumerate(found[name])
        if step.peak_bytes > limit
    ]


def main() -> int:
    if sys.argv[1:2] == ["--work"]:
        work(Job.read(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    train_gpt.add_model_flags(parser)
    parser.set_defaults(layers=12, seq=512, lr=3e-4)
    parser.add_argument("--family", choices=families.FAMILIES, default="gpt")
    parser.add_argument("--scene", choices=SCENES, default="steady")
    parser.add_argument("--steps", type=int, default=0, help="default 16, and 60 of the scene that changes")
    parser.add_argument("--warm", type=int, default=9, help="steps that count for the peak alone; two of them compile")
    parser.add_argument("--pytorch", action="store_true", help="PyTorch's own budgets as well")
    parser.add_argument("--quick", action="store_true", help="a small model")
    flags = parser.parse_args()
    if flags.quick:
        flags.layers, flags.width, flags.heads, flags.seq, flags.batch = 4, 128, 4, 256, 8
    steps = flags.steps or (END // (3 if flags.quick else 1) if flags.scene == "changes" else 16)
    model, directory = Model.of(flags), flags.dir or tempfile.gettempdir()
    announce(directory, model=f"{model}, {flags.scene}\n")

    def job(way: str, limit: int = 0, share: float = 1.0) -> Job:
        return Job(model, flags.scene, way, limit, directory, flags.quick, share)

    ends = run({way: job(way) for way in ("budget0", "inductor")}, ENDS)
    least, most = (max(step.peak_bytes for step in ends[way]) for way in ("budget0", "inductor"))
    if flags.scene == "changes":  # a batch twice as large, and two models
        least, most = 2 * least, 2 * most
    limits = {f"{share:.0%}": int(least + share * (most - least)) for share in SHARES}
    jobs = {name: job("memory", limit) for name, limit in limits.items()}
    rivals = {f"PyTorch {share}": job("recompute", share=share) for share in PYTORCH if flags.pytorch}
    found = run({"budget0": job("budget0"), **jobs, **rivals, "inductor": job("inductor")}, steps)
    print(table(found, limits, flags.warm))
    wrong = over(found, limits)
    print(*wrong, sep="\n")
    if flags.json:
        write_json(flags.json, {n: [asdict(s) for s in each] for n, each in found.items()} | {"limits": limits})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
