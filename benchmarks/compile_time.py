"""How long partition and planning take beside the whole compilation, and how that grows with the number of layers.

python benchmarks/compile_time.py                            # 6, 12, 24 and 48 layers
python benchmarks/compile_time.py --layers 12 48 --pairs 3   # beside plain Inductor, in turns
python benchmarks/compile_time.py --layers 12 --pairs 3 --dir DIR --width 384 --heads 6 --batch 8 --seq 512 \
    --min-bytes 1MiB                                         # what a user waits for

How it is measured: one process for each size, with no warm cache of any kind. The compile time is that of the first
step less that of the third one. The parts are timed from outside, by wrapping the functions of the pipeline, on the
wall clock as the whole is; how they grow is told from their CPU time, which a busy machine does not change. "rest" is
what the partitioner does besides. Plain Inductor makes the first cut, too. "order" is the pass in Inductor's scheduler,
forward and backward together. The model is narrow, because its width changes what the code that was compiled has to do
and not the compilation; and everything that can leave does (`--min-bytes 0`), the tiny groups that a real model would
keep included. A user waits for less: a wide model, the option's default `--min-bytes 1MiB`, and with `--dir` this
machine's own rates and a drive. Without `--dir`, the plan goes by typical rates, so it is the same on every machine.
The memory engine then takes what is written, and the first step touches that memory for the first time, which counts as
compile time here.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import growth
import torch
from system import announce, write_json
from training import train_gpt

import ssd_fx
from ssd_fx.passes import decide, partitioner, pipeline, proposals
from ssd_fx.passes.joint import recompute
from ssd_fx.passes.lowering import order


class Clock:
    """Seconds by name, of functions that are called while it is installed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.nodes = self.groups = 0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                self.cpu[name] = self.cpu.get(name, 0.0) + time.thread_time() - cpu

        return run


@contextmanager
def installed(clock: Clock) -> Iterator[None]:
    """Every function of the pipeline under the clock."""
    partition, plan_of, cut_of = partitioner.Partitioner.__call__, decide.decide, recompute.Joint._cut

    def cut(self: Any, module: torch.fx.GraphModule) -> Any:
        name = growth.FURTHER_CUTS if growth.FIRST_CUT in clock.seconds else growth.FIRST_CUT
        return clock.timed(name, cut_of)(self, module)

    def timed_passes(passes: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        return lambda *args, **kwargs: tuple(clock.timed(module_name(each), each) for each in passes(*args, **kwargs))

    def counting(self: Any, gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        clock.nodes = max(clock.nodes, len(gm.graph.nodes))
        return partition(self, gm, *args, **kwargs)

    def planning(*args: Any, **kwargs: Any) -> Any:
        plan = plan_of(*args, **kwargs)
        clock.groups = max(clock.groups, len(plan.groups))
        return plan

    changes: list[tuple[Any, str, Any]] = [
        (partitioner.Partitioner, "__call__", clock.timed(growth.PLANNING, counting)),
        (order.PinOrder, "__call__", clock.timed(growth.ORDER, order.PinOrder.__call__)),
        (decide, "analyses", timed_passes(decide.analyses)),
        (decide, "decisions", timed_passes(decide.decisions)),
        (proposals, "decide", planning),
    ]
    found = [(decide, "fingerprint", "name"), (pipeline, "insert", "insert"), (decide, "verify_plan", "verify")]
    found += [(pipeline, "verify_graphs", "verify")]
    changes += [(place, name, clock.timed(title, getattr(place, name))) for place, name, title in found]
    changes.append((recompute.Joint, "_cut", cut))
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    for place, name, function in changes:
        setattr(place, name, function)
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def module_name(function: Any) -> str:
    """Of a pass, which may be a `functools.partial`: its module's name, as docs/design.md calls it."""
    function = getattr(function, "func", function)
    return str(function.__module__).rpartition(".")[2]


def compile_once(flags: argparse.Namespace) -> growth.Compiled:
    """Compile and train for three steps in this process."""
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False
    torch.manual_seed(0)
    layers = flags.layers[0]
    model = train_gpt.GPT(train_gpt.Shape(layers, flags.width, flags.heads, flags.seq, 0.1))
    options = {"min_bytes": flags.min_bytes, "budget": flags.budget, "inner": flags.inner}
    options |= {"dirs": [flags.dir]} if flags.dir else {"engine": "memory"}
    ours: dict[str, Any] = {"backend": ssd_fx.backend, "options": options}
    forward = torch.compile(model, **({} if flags.plain else ours))
    clock, steps = Clock(), []
    with installed(clock):
        for _, (inputs, targets) in zip(range(3), train_gpt.batches(flags.batch, flags.seq, 0), strict=False):
            start = time.perf_counter()
            forward(inputs, targets).backward()
            steps.append(time.perf_counter() - start)
    return growth.Compiled(layers, clock.nodes, clock.groups, steps[0] - steps[2], clock.seconds, clock.cpu)


def compile_cold(flags: argparse.Namespace, layers: int, *, plain: bool = False) -> growth.Compiled:
    """`compile_once` in a process of its own, with empty caches. `plain`: by Inductor without ssd_fx."""
    worker = ["--layers", str(layers), "--worker"]
    worker += ["--plain"] if plain else []
    for name in ("width", "heads", "batch", "seq", "budget", "min_bytes", "inner", "dir"):
        worker += [f"--{name.replace('_', '-')}", str(getattr(flags, name))] if getattr(flags, name) else []
    with tempfile.TemporaryDirectory(prefix="ssd_fx-compile-") as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, __file__, *worker], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    return growth.Compiled(**json.loads(done.stdout))


def pairs(flags: argparse.Namespace) -> Iterator[str]:
    """A row for every number of layers: how long plain Inductor and ssd_fx compile, in turns."""
    yield "| layers | Inductor, s | ssd_fx, s | ratio (least to most) | partition, planning, s | order, s |"
    yield "|---|---|---|---|---|---|"
    for layers in flags.layers:
        found = [
            (compile_cold(flags, layers, plain=True).compile_s, compile_cold(flags, layers)) for _ in range(flags.pairs)
        ]
        ratios = sorted(ours.compile_s / plain for plain, ours in found)
        cells = [median(plain for plain, _ in found), median(ours.compile_s for _, ours in found)]
        parts = [median(ours.seconds[part] for _, ours in found) for part in (growth.PLANNING, growth.ORDER)]
        ratio = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        yield f"| {layers} | {cells[0]:.1f} | {cells[1]:.1f} | {ratio} | {parts[0]:.1f} | {parts[1]:.1f} |"


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, nargs="+", default=[6, 12, 24, 48], help="default %(default)s")
    for name, default in {"width": 64, "heads": 2, "batch": 2, "seq": 64}.items():
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    add("--budget", default="auto", help="as the option, default %(default)s")
    add("--min-bytes", default="0", help="as the option, default %(default)s")
    add(
        "--inner", default="inductor", choices=("inductor", "aot_eager"), help="aot_eager: no kernels, for a quick look"
    )
    add("--dir", help="write there, and plan with the rates of this machine")
    add("--pairs", type=int, default=0, help="compile so many times each with plain Inductor and with ssd_fx")
    add("--json", metavar="OUT", help="write the figures to this file")
    for name in ("--worker", "--plain"):
        add(name, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def work(flags: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not mix with the answer
    print(json.dumps(asdict(compile_once(flags))), file=answers, flush=True)


def main() -> None:
    flags = parse_flags(sys.argv[1:])
    if flags.worker:
        return work(flags)
    model = f"GPT, width {flags.width}, {flags.heads} heads, {flags.batch} x {flags.seq}"
    where = announce(flags.dir, model=model)
    if flags.pairs:
        for row in pairs(flags):
            print(row, flush=True)
        return
    runs = []
    for layers in flags.layers:
        run = compile_cold(flags, layers)
        runs.append(run)
        print(f"{layers} layers: {run.compile_s:.1f} s", file=sys.stderr, flush=True)
    print(f"\n{growth.table(runs)}")
    if flags.inner == "inductor":  # without kernels, the share says nothing
        print(f"\n{growth.verdict(runs)}")
    if flags.json:
        result = {"system": where, "flags": vars(flags), "runs": [asdict(run) for run in runs]}
        write_json(flags.json, result)


if __name__ == "__main__":
    main()
