"""Whether training stays within the option `memory`, how much of it is used, and what a tight limit costs.

python benchmarks/fit_memory.py --dir /mnt/nvme                        # a GPT of 12 layers under five limits
python benchmarks/fit_memory.py --dir /mnt/nvme --scene blocks         # each block compiled by itself
python benchmarks/fit_memory.py --dir /mnt/nvme --scene fsdp           # and sharded, on two ranks
python benchmarks/fit_memory.py --dir /mnt/nvme --scene changes        # another batch, evaluation, a second model
python benchmarks/fit_memory.py --dir /mnt/nvme --pytorch --plot FILE  # beside PyTorch's activation_memory_budget
python benchmarks/fit_memory.py --dir /mnt/nvme --quick                # a small model

How it is measured: a process for each limit, one step of each in turn. The peak is that of all live CPU tensors of the
process in a step, parameters, gradients and the optimizer's state included (memtrack.c, and what ssd_fx's allocator
reports). "Counted" is the share of the limit by ssd_fx's own count, which has what MKL and oneDNN keep, too. On two
ranks it is the higher one. The limits lie between the lowest peak, which is that of a limit that cannot be met, and
Inductor's.

Most of the time would go into compiling, once for each limit. So all have one text of options, `memory="100%"`, and
each process is told that its machine has as many bytes as its limit. Then the second one finds what the first has
compiled. Inductor, PyTorch's budgets and the lowest peak run in the first rounds and in those that are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import IO, Any

import families  # neighbours of this file
import peak
import svg
import torch
import torch._functorch.config
from families import train_gpt
from system import MIB, announce, write_json
from torch.distributed.fsdp import fully_shard
from training import Model
from turns import hold_memory
from ways import Way, blocks, compiled

SCENES = ("steady", "blocks", "micro", "amp", "fsdp", "changes")
SHARES = (0.03, 0.25, 0.5, 0.75, 1.1)  # of the way from the lowest peak to Inductor's
ENDS = 3  # steps that find these two peaks
LOWEST, INDUCTOR = "lowest", "inductor"
RIVAL = "PyTorch"  # before its budget
PYTORCH = (0.1, 0.3, 0.5, 0.8)  # of its own budget
RANKS = 2  # of the scene "fsdp"
GROWS, SHRINKS, SECOND, EVALUATES, END = 20, 40, 50, 5, 60  # steps of the scene "changes"


@dataclass(frozen=True)
class Job:
    """What one process trains. `limit`: bytes; 0 for none. `way`: "inductor", "recompute" or "memory".

    `share`: PyTorch's `activation_memory_budget`, of the way "recompute". `ranks`: processes that train together.
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
        return self.way == "memory"

    @property
    def ranks(self) -> int:
        return RANKS if self.scene == "fsdp" else 1

    @staticmethod
    def read(text: str) -> Job:
        given = json.loads(text)
        return Job(**(given | {"model": Model(**given["model"])}))

    @property
    def options(self) -> dict[str, Any]:
        """The same for all limits, as all are compiled from them."""
        return {"dirs": [self.directory], "memory": "100%"} | ({"min_bytes": 1 << 16} if self.small else {})


@dataclass(frozen=True)
class Step:
    """Bytes of all live tensors at the peak, seconds of the clock and of all threads, the loss.

    Of ssd_fx the bytes that stayed for the backward, that were written, and that it counted at the peak: what libraries
    keep, too.
    """

    peak_bytes: int
    time_s: float
    cpu_s: float
    loss: float
    stay_bytes: int
    written_bytes: int
    counted_bytes: int


def training(job: Job) -> Iterator[Step]:
    """Endless steps."""
    about, ours = job.model, job.ours
    tracker = peak.Peak()
    if ours:
        _prepare(job, tracker)
    torch.manual_seed(about.seed)
    shape = train_gpt.Shape(about.layers, about.width, about.heads, about.seq, about.dropout)
    models = [_made(job, shape)]
    data = {
        size: families.batches(about.family, size, about.seq, about.seed) for size in {about.batch, 2 * about.batch}
    }
    number = 0
    while True:
        if job.scene == "changes" and number == SECOND:
            models.append(_made(job, shape))
        larger = job.scene == "changes" and GROWS <= number < SHRINKS
        began, cpu = time.perf_counter(), time.process_time()
        with tracker as memory:
            if job.scene == "changes" and number % EVALUATES == 0:
                with torch.no_grad():
                    models[0][0](*next(data[2 * about.batch]))
            for forward, optimizer in models:
                loss = _step(job, forward, optimizer, data[(2 if larger else 1) * about.batch])
        highest = memory.start_bytes + memory.peak_bytes
        number += 1
        times = time.perf_counter() - began, time.process_time() - cpu
        yield Step(highest, *times, loss, *(_offloaded() if ours else (0, 0, 0)))


def _prepare(job: Job, tracker: peak.Peak) -> None:
    """Has the machine's rates measured, which takes tensors too, and has it look as large as the limit."""
    from ssd_fx.calibration.calibrate import calibrated
    from ssd_fx.config import Config
    from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
    from ssd_fx.runtime.memory.gauge import CpuGauge

    CPU_ALLOCATOR.observe(tracker.address)
    hold_memory()
    CpuGauge.total_bytes = lambda self: job.limit * job.ranks  # type: ignore[method-assign]
    calibrated(Config.make(job.options), torch.device("cpu"))


def _made(job: Job, shape: train_gpt.Shape) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    model = families.make(job.model.family, shape, job.model.vocabulary)
    if job.scene not in ("blocks", "fsdp"):
        way: Way = "ssd_fx" if job.ours else "recompute"
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.model.lr)
        return compiled(model, way, job.share, job.options if job.ours else {}, "")[0], optimizer
    torch._functorch.config.activation_memory_budget = job.share
    for block in blocks(model):
        if job.ours:
            import ssd_fx

            block.compile(backend=ssd_fx.backend, options=job.options)
        else:
            block.compile()
        if job.scene == "fsdp":
            fully_shard(block)
    if job.scene == "fsdp":
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=job.model.lr)


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


def _offloaded() -> tuple[int, int, int]:
    import ssd_fx

    found = ssd_fx.stats()
    written = found.written_bytes
    ssd_fx.reset_stats()
    return found.memory_stay_bytes, written, found.memory_peak_bytes


def work(job: Job) -> None:
    """Answer every line on stdin with a step, as a line of JSON on stdout."""
    os.environ.pop("LD_PRELOAD", None)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if job.ranks > 1:
        torch.distributed.init_process_group("gloo")
    steps = training(job)
    for _ in sys.stdin:
        print(json.dumps(asdict(next(steps))), file=answers)


class Worker:
    """Trains a job in a process of its own, or in one for each rank."""

    def __init__(self, name: str, job: Job, stack: ExitStack) -> None:
        self._name = name
        self.steps: list[Step] = []
        command = [sys.executable, __file__, "--work", json.dumps(asdict(job))]
        environment = os.environ | peak.environment()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = []
        for rank in range(job.ranks):
            if job.ranks > 1:
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                environment |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
                environment |= {name: str(job.ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment)
            self._processes.append(stack.enter_context(process))

    def step(self) -> None:
        for process in self._processes:
            print(file=process.stdin)
        found = [self._answer(process.stdout) for process in self._processes]
        highest = max(found, key=lambda step: step.peak_bytes)
        self.steps.append(replace(highest, cpu_s=sum(step.cpu_s for step in found)))

    def _answer(self, answers: IO[str] | None) -> Step:
        line = answers.readline() if answers else ""
        if not line:
            raise RuntimeError(f"the worker {self._name!r} has ended")
        return Step(**json.loads(line))


def rounds(workers: Iterable[Worker], count: int) -> None:
    for _ in range(count):
        for worker in workers:
            worker.step()


def row(name: str, steps: Sequence[Step], limit: int, timed: int) -> str:
    last = steps[-timed:]
    highest, used = max(s.peak_bytes for s in steps), max(s.peak_bytes for s in last)
    seconds, cpu = median(s.time_s for s in last), median(s.cpu_s for s in last)
    held = "" if not limit else "yes" if highest <= limit else f"NO, {(highest - limit) / MIB:.1f} MiB over"
    shares = [f"{each / limit:.1%}" if limit else "" for each in (used, max(s.counted_bytes for s in last))]
    figures = [f"{limit / MIB:.1f}" if limit else "", f"{highest / MIB:.1f}", held, *shares]
    figures += [f"{steps[-1].stay_bytes / MIB:.1f}", f"{steps[-1].written_bytes / MIB:.1f}"]
    return f"| {name} | " + " | ".join([*figures, f"{seconds:.3f}", f"{cpu:.3f}"]) + " |"


def table(found: Mapping[str, Sequence[Step]], limits: Mapping[str, int], timed: int) -> str:
    """The highest peak is that of all steps. What is used, and times, are those of the last `timed` ones."""
    head = "| | limit, MiB | highest peak, MiB | held | used | counted "
    head += "| stays, MiB | written, MiB a step | step, s | CPU, s |"
    rows = [row(name, steps, limits.get(name, 0), timed) for name, steps in found.items()]
    return "\n".join([head, "|---|" + "---|" * 9, *rows])


def picture(found: Mapping[str, Sequence[Step]], timed: int) -> str:
    """Peak against time: medians of the last `timed` steps, with quartiles."""

    def point(name: str) -> svg.Point:
        last = found[name][-timed:]
        low, middle, high = quantiles((step.time_s for step in last), n=4)
        return svg.Point(max(step.peak_bytes for step in last) / MIB, middle, low, high, name)

    lines: dict[str, list[str]] = {"memory=": [], "PyTorch's budget": [], "Inductor": [INDUCTOR]}
    for name in found:
        if name != INDUCTOR:
            lines["PyTorch's budget" if name.startswith(RIVAL) else "memory="].append(name)
    series = {line: sorted(map(point, names), key=lambda p: p.x) for line, names in lines.items() if names}
    return svg.plot(series, title="A limit of memory and what it costs", x="measured peak, MiB", y="step, s")


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
    parser.set_defaults(layers=12, width=256, heads=4, lr=3e-4)
    parser.add_argument("--family", choices=families.FAMILIES, default="gpt")
    parser.add_argument("--scene", choices=SCENES, default="steady")
    parser.add_argument("--limits", type=float, nargs="+", default=SHARES, help="shares of the way between the ends")
    parser.add_argument("--steps", type=int, default=0, help="default 14, and 60 of the scene that changes")
    parser.add_argument(
        "--timed", type=int, default=4, help="so many steps at the end count for times and what is used"
    )
    parser.add_argument("--pytorch", action="store_true", help="PyTorch's own budgets as well")
    parser.add_argument("--plot", help="where a picture of peak and time goes, an SVG file")
    parser.add_argument("--quick", action="store_true", help="a small model")
    flags = parser.parse_args()
    if flags.quick:
        flags.layers, flags.width, flags.heads, flags.seq, flags.batch = 4, 128, 4, 256, 8
    steps = flags.steps or (END if flags.scene == "changes" else 14)
    model, directory = Model.of(flags), flags.dir or tempfile.gettempdir()
    announce(directory, model=f"{model}, {flags.scene}\n")

    def job(way: str, limit: int = 0, share: float = 1.0) -> Job:
        return Job(model, flags.scene, way, limit, directory, flags.quick, share)

    with ExitStack() as stack:
        ends = {LOWEST: Worker(LOWEST, job("memory", 1), stack), INDUCTOR: Worker(INDUCTOR, job("inductor"), stack)}
        rounds(ends.values(), ENDS)
        least, most = (max(step.peak_bytes for step in each.steps) for each in ends.values())
        if flags.scene == "changes":  # a batch twice as large, and two models
            least, most = 2 * least, 2 * most
        limits = {f"{share:.0%}": int(least + share * (most - least)) for share in flags.limits}
        limited = {name: Worker(name, job("memory", limit), stack) for name, limit in limits.items()}
        rivals = [(f"{RIVAL} {share}", job("recompute", share=share)) for share in PYTORCH if flags.pytorch]
        others = {name: Worker(name, each, stack) for name, each in rivals}
        rounds(others.values(), ENDS)
        rounds(limited.values(), steps - flags.timed)
        workers = {LOWEST: ends[LOWEST], **limited, **others, INDUCTOR: ends[INDUCTOR]}
        rounds(workers.values(), flags.timed)
    found = {name: worker.steps for name, worker in workers.items()}
    print(table(found, limits, flags.timed))
    if flags.plot:
        Path(flags.plot).write_text(picture(found, flags.timed))
    wrong = over(found, limits)
    print(*wrong, sep="\n")
    if flags.json:
        write_json(flags.json, {n: [asdict(s) for s in each] for n, each in found.items()} | {"limits": limits})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
