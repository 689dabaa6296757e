"""Bubbles of a pipeline of two ranks under 1F1B: measured idle time beside (p-1)/(n+p-1).

Run as a script it is one rank.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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

from paper import text
from paper.measure import Result, Setup
from paper.part import Part

RANKS = 2


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
    """One rank: a line of JSON with the seconds of every step, and of them those in which it computed."""
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
    clock = _timed(stage)
    schedule: Any = Schedule1F1B(stage, n_microbatches=about["samples"] // about["micro"], loss_fn=_loss)
    tokens, targets = next(train_gpt.batches(about["samples"], about["seq"], 0))
    steps = []
    for step in range(about["warmup"] + about["rounds"]):
        dist.barrier()
        clock[0], start = 0.0, time.perf_counter()
        schedule.step(*([tokens] if number == 0 else []), **({} if number == 0 else {"target": targets}))
        ended, busy = time.perf_counter() - start, clock[0]
        half.zero_grad()
        if step >= about["warmup"]:
            steps.append((round(ended, 5), round(busy, 5)))
    dist.barrier()
    print(json.dumps(steps), flush=True)
    dist.destroy_process_group()


def _timed(stage: PipelineStage) -> list[float]:
    """A list of one number, to which the stage adds the seconds that it computes."""
    spent = [0.0]

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(stage, name, timed(getattr(stage, name)))
    return spent


def _measure(setup: Setup) -> Result:
    samples, (width, layers) = (4 if setup.quick else 32), setup.shapes[0]
    about = {"layers": max(layers // RANKS, 1), "width": width, "heads": max(width // setup.head, 1), "seq": setup.seq}
    about |= {"vocabulary": setup.vocabulary, "samples": samples, "warmup": setup.warmup, "rounds": setup.rounds}
    sizes = (2,) if setup.quick else (4, 1, 8, 2, 16)
    cases = {f"{way}, micro-batch {m}": {"way": way, "micro": m} for m in sizes for way in ("inductor", "ssd_fx")}
    found: Result = {"planned": list(cases), "cases": {}}
    for label, case in setup.due(cases):
        steps = _ranks({**about, **case, "dir": setup.dir})
        found["cases"][label] = {**case, "microbatches": samples // int(str(case["micro"])), "steps": steps}
        found["cases"][label]["rounds"] = len(steps[0])
    return found


def _ranks(about: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """Steps of every rank.

    Raises:
        SystemExit: a rank failed; its message is above.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, json.dumps(about)]
    with tempfile.TemporaryDirectory() as caches:  # one for each rank: Inductor does not write its files at once
        own = [{"RANK": str(n), "TORCHINDUCTOR_CACHE_DIR": f"{caches}/{n}"} for n in range(RANKS)]
        ranks = [subprocess.Popen(command, env=place | each, stdout=subprocess.PIPE, text=True) for each in own]
        said = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"a rank of the pipeline {about} failed; its message is above")
    return [json.loads(lines.splitlines()[-1]) for lines in said]


def idle(case: Result) -> float:
    """The share of the step in which a rank does not compute, in the mean of the ranks; the median of the steps."""
    shares = [[1 - busy / step for step, busy in steps] for steps in case["steps"]]
    return float(median(sum(each) / len(each) for each in zip(*shares, strict=True)))


def ideal(microbatches: int) -> float:
    return (RANKS - 1) / (microbatches + RANKS - 1)


def _step(case: Result) -> tuple[str, str]:
    """The seconds of a step, those of the slower rank, and the number of steps."""
    seconds = [max(own[0] for own in ranks) for ranks in zip(*case["steps"], strict=True)]
    return f"{median(seconds):.3f}", str(len(seconds))


def _section(result: Result) -> str:
    rows = [
        (label, str(case["microbatches"]), f"{ideal(case['microbatches']):.1%}", f"{idle(case):.1%}", *_step(case))
        for label, case in result["cases"].items()
    ]
    head = ("", "n", "(p-1)/(n+p-1)", "measured idle", "step, s", "rounds")
    return "\n\n".join([text.table(head, rows), *text.missing(result)])


def _plot(result: Result) -> str:
    series: dict[str, list[Point]] = {}
    for case in result["cases"].values():
        x, ideally, measured = float(case["micro"]), ideal(case["microbatches"]), idle(case)
        series.setdefault(case["way"], []).append(Point(x, measured, measured, measured))
        if case["way"] == "inductor":
            series.setdefault("ideal", []).append(Point(x, ideally, ideally, ideally))
    ordered = {name: sorted(points, key=lambda point: point.x) for name, points in series.items()}
    return svg.plot(ordered, title="Two ranks, 1F1B", x="micro-batch", y="share of the step that ranks are idle")


PART = Part(
    name="bubbles",
    title="Bubbles of a pipeline",
    share=0.06,
    paper="BLOOM with 32 samples per rank: from a micro-batch of 4 on the ideal bubble is at least 11.5%.",
    not_shown="Both ranks are on one machine, one core each, and share a drive. Waiting for the drive counts as work.",
    measure=_measure,
    section=_section,
    plot=_plot,
)

if __name__ == "__main__":
    rank(json.loads(sys.argv[1]))
