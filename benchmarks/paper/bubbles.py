"""Bubbles of a pipeline of two ranks under 1F1B: measured idle time beside (p-1)/(n+p-1).

A rank is idle from its last work to the end of the step, which is that of the last rank. Run as a script it is one
rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import svg
import torch
import torch.distributed as dist
import torch.nn.functional as F
from families import Layer, train_gpt
from svg import Point
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from workers import order

from paper import text
from paper.measure import Result, Setup
from paper.part import Part

RANKS = 2
WAYS = ("inductor", "ssd_fx")
STOP_S = 30


class Half(nn.Module):
    """The layers of one stage; the first one has the embedding, the last one the head."""

    def __init__(self, shape: train_gpt.Shape, vocabulary: int, first: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width) if first else None
        self.blocks = nn.ModuleList(Layer(shape, causal=True) for _ in range(shape.layers))
        self.head = None if first else nn.Linear(shape.width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rank(about: dict[str, Any]) -> None:
    """One rank. It answers every line on stdin with a line of JSON: seconds of a step, and those that it computed."""
    import ssd_fx

    number = int(os.environ["RANK"])
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // RANKS, 1))
    dist.init_process_group("gloo", rank=number, world_size=RANKS)
    torch.manual_seed(0)
    shape = train_gpt.Shape(about["layers"], about["width"], about["heads"], about["seq"], 0.1)
    half = Half(shape, about["vocabulary"], number == 0)
    how: dict[str, Any] = {"backend": "inductor"}
    if about["way"] == "ssd_fx":
        how = {"backend": ssd_fx.backend, "options": {"dirs": [about["dir"]], "ranks": 1, "budget": 0}}
    compiled: Any = torch.compile(half, **how)
    stage = PipelineStage(compiled, number, RANKS, torch.device("cpu"))
    clock = Clock()
    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(stage, name, clock.timed(getattr(stage, name)))
    schedule: Any = Schedule1F1B(stage, about["samples"] // about["micro"], loss_fn=clock.timed(_loss))
    tokens, targets = next(train_gpt.batches(about["samples"], about["seq"], 0))
    for _ in sys.stdin:
        dist.barrier()
        clock.seconds, start = 0.0, time.perf_counter()
        schedule.step(*([tokens] if number == 0 else []), **({} if number == 0 else {"target": targets}))
        answer = (round(time.perf_counter() - start, 5), round(clock.seconds, 5))
        half.zero_grad()
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


class Clock:
    """Adds up the seconds of the functions that it times."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


class Pipeline:
    """The processes of all ranks, which make a step together whenever they are asked to."""

    def __init__(self, about: dict[str, Any], caches: str) -> None:
        """caches: a directory. Every rank has its own caches there, so that Inductor does not write files at once."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, json.dumps(about)]
        own = [{"RANK": str(n), "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{about['way']}{n}"} for n in range(RANKS)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.ranks = [subprocess.Popen(command, env=place | each, **pipes) for each in own]
        self.name = about["way"]

    def step(self) -> list[tuple[float, float]]:
        """Of every rank: the seconds of the step, and those that it computed.

        Raises:
            SystemExit: a rank failed; its message is above.
        """
        for process in self.ranks:
            assert process.stdin is not None
            print("step", file=process.stdin)
        answers = [process.stdout.readline() if process.stdout else "" for process in self.ranks]
        if not all(answers):
            raise SystemExit(f"a rank of the pipeline under {self.name} failed; its message is above")
        return [tuple(json.loads(answer)) for answer in answers]

    def stop(self) -> None:
        """Also of ranks that wait for one that failed."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _measure(setup: Setup) -> Result:
    samples, (width, layers) = (4 if setup.quick else 32), setup.shapes[0]
    about: dict[str, Any] = {"layers": max(layers // RANKS, 1), "width": width, "heads": max(width // setup.head, 1)}
    about |= {"seq": setup.seq, "vocabulary": setup.vocabulary, "samples": samples, "dir": setup.dir}
    cases = {f"micro-batch {m}": m for m in ((2,) if setup.quick else (4, 1, 8, 2, 16))}
    found: Result = {"planned": list(cases), "cases": {}}
    for label, micro in setup.due(cases):
        print(f"-- {label}", file=sys.stderr, flush=True)
        steps = _turns({**about, "micro": micro}, setup.warmup, setup.rounds)
        case = {"micro": micro, "microbatches": samples // micro, "rounds": setup.rounds, "steps": steps}
        found["cases"][label] = case
    return found


def _turns(about: dict[str, Any], warmup: int, rounds: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Rounds of one step under every way: of each way its steps, of each step its ranks."""
    steps: dict[str, list[list[tuple[float, float]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as caches, contextlib.ExitStack() as stack:
        pipelines = {}
        for way in WAYS:
            pipelines[way] = Pipeline({**about, "way": way}, caches)
            stack.callback(pipelines[way].stop)
            pipelines[way].step()  # compiles
        for number in range(warmup + rounds):
            for way in order(WAYS, number):
                taken = pipelines[way].step()
                steps[way] += [taken] if number >= warmup else []
    return steps


def _seconds(ranks: Sequence[tuple[float, float]]) -> float:
    """Of a step: until the last rank has ended."""
    return max(own for own, _ in ranks)


def idle(ranks: Sequence[tuple[float, float]]) -> float:
    """The share of a step in which a rank does not compute, in the mean of the ranks."""
    return 1 - sum(busy for _, busy in ranks) / len(ranks) / _seconds(ranks)


def ideal(microbatches: int) -> float:
    return (RANKS - 1) / (microbatches + RANKS - 1)


def _row(way: str, case: Result) -> tuple[str, ...]:
    shares = [idle(ranks) for ranks in case["steps"][way]]
    low, high = text.median_interval(shares)
    each = {name: {"time_s": [_seconds(ranks) for ranks in steps]} for name, steps in case["steps"].items()}
    measured = f"{median(shares):.1%} ({low:.1%} to {high:.1%})"
    count, best = str(case["microbatches"]), f"{ideal(case['microbatches']):.1%}"
    ratio = str(text.Ratio.of(each[way], each[WAYS[0]]))
    return f"{way}, micro-batch {case['micro']}", count, best, measured, f"{median(each[way]['time_s']):.3f}", ratio


def _section(result: Result) -> str:
    cases = sorted(result["cases"].values(), key=lambda case: int(case["micro"]))
    rows = [_row(way, case) for case in cases for way in WAYS]
    head = ("", "n", "(p-1)/(n+p-1)", "measured idle", "step, s", "time to Inductor")
    counts = {text.rounds(case) for case in cases}
    return "\n\n".join([f"{'; '.join(sorted(counts))}.", text.table(head, rows), *text.missing(result)])


def _plot(result: Result) -> str:
    series: dict[str, list[Point]] = {"ideal": []}
    for case in sorted(result["cases"].values(), key=lambda case: int(case["micro"])):
        x, best = float(case["micro"]), ideal(case["microbatches"])
        series["ideal"].append(Point(x, best, best, best))
        for way in WAYS:
            shares = [idle(ranks) for ranks in case["steps"][way]]
            series.setdefault(way, []).append(Point(x, median(shares), *text.median_interval(shares)))
    return svg.plot(series, title="Two ranks, 1F1B", x="micro-batch", y="share of the step that ranks are idle")


PART = Part(
    name="bubbles",
    title="Bubbles of a pipeline",
    share=0.06,
    paper="BLOOM with 32 samples per rank: from a micro-batch of 4 on the ideal bubble is at least 11.5%.",
    not_shown="Both ranks are on one machine, one core each, and share a drive. Waiting for the drive counts as work, "
    "and so does the loss.",
    measure=_measure,
    section=_section,
    plot=_plot,
)

if __name__ == "__main__":
    rank(json.loads(sys.argv[1]))
