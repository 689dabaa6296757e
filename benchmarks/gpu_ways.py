"""On a GPU: one transformer trained in several ways that take turns, so that one table shows what each saves and costs.

python benchmarks/gpu_ways.py --dir /mnt/nvme --layers 2 --width 12288 --heads 96 --batch 12 --optimizer sgd \\
    --ways memory:auto memory:0 recompute:0.5
python benchmarks/gpu_ways.py --print FILE.json ...   # the tables of what was measured before

A way is one of these:
- ENGINE:BUDGET[:HOST_BUDGET] of ssd_fx, with more options behind commas (memory:0,inflight=4GiB);
- the same behind blocks: (blocks:memory:0), which compiles each layer by itself; the other operators run eagerly;
- recompute:SHARE, which is plain Inductor with that `activation_memory_budget`;
- checkpoint, which is plain Inductor with a checkpoint around every layer;
- host, which is PyTorch's `save_on_cpu` with pinned memory around layers that plain Inductor compiles one by one, but
  for strides: it loses them, and compiled code asserts them.
Plain Inductor is always there. All train one model with one optimizer, so that a wide one has room. The first step of a
way compiles, and pins host memory where no way before has. No event is around any node, so the steps after it are all
alike. gpu_steps.py says what a step is.

Several such processes may compile at once: with one `--turns FILE` each measures when all have compiled, and alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import families  # neighbours of this file
import torch
import ways as others
from gpu_bandwidth import ALONE
from gpu_machine import add_flags, prepare, results_path, slug, system
from gpu_steps import OPTIMIZERS, Training, kernels, no_events
from predicted import read as read_plan
from system import MIB, write_json
from torch._inductor.compile_fx import compile_fx
from turns import Turn

import ssd_fx
from ssd_fx.config import Config
from ssd_fx.runtime import trace
from ssd_fx.runtime.engines.registry import ENGINES

PLAIN, CHECKPOINT, HOST, RECOMPUTE, BLOCKS = "plain", "checkpoint", "host", "recompute", "blocks:"
COLUMNS = (
    *("way", "step ms", "of plain", "peak MiB", "less", "can go", "saved MiB", "written", "read", "stall ms"),
    *("without optimizer ms", "predicted"),
)


class Way:
    """A compilation of the model of `training`, and what was measured of it.

    `first_s`: the first step. `ended`: why it takes no part any more.
    """

    def __init__(self, name: str, training: Training, flags: argparse.Namespace, scratch: str) -> None:
        self.name, self.steps, self.first_s, self.ended = name, list[dict[str, Any]](), 0.0, ""
        self._training, self._plan, self._ours = training, "", engine_of(name) in ENGINES
        self._around: Callable[[], AbstractContextManager[Any]] = nullcontext
        engine, _, rest = name.partition(":")
        if name == PLAIN:
            self._compiled: Any = torch.compile(training.model)
        elif name == CHECKPOINT:
            self._compiled = torch.compile(others.with_layers(training.model, others.Checkpointed))
        elif name == HOST:
            self._compiled = others.with_layers(training.model, _inductor)
            self._around = partial(torch.autograd.graph.saved_tensors_hooks, _to_pinned, _from_pinned)
        elif engine == RECOMPUTE:
            self._compiled = torch.compile(training.model, backend=_recomputing(float(rest)))
        else:
            options = {"dirs": [flags.dir], "allow_tmpfs": flags.allow_tmpfs} | options_of(name)
            if name.startswith(BLOCKS):  # no plan is of the whole step
                self._compiled = others.with_layers(training.model, lambda layer: _offloading(layer, options))
            else:
                self._plan = options["dump"] = tempfile.mkdtemp(dir=scratch)
                self._compiled = _offloading(training.model, options)

    def step(self, measured: bool) -> None:
        """One step. A way for which the GPU has no memory ends."""
        self.take()
        try:
            made = self._training.step()
        except torch.OutOfMemoryError as error:
            self.ended = str(error).partition("\n")[0]
            return
        self.first_s = self.first_s or made.time_s
        if measured:
            self.steps.append(asdict(made))

    def take(self) -> Training:
        """The training, which goes this way from here on."""
        self._training.compiled, self._training.ours = self._compiled, self._ours
        self._training.around = self._around
        return self._training

    def profiled(self, path: Path) -> dict[str, Any]:
        """The kernels of one more step. Its timeline goes beside `path`, if the way has events of ours."""
        trace.clear()  # it has the steps of all ways
        training = self.take()
        timeline = Path(f"{path}-{slug(self.name.replace(':', ' '))}.trace.json.gz")
        return kernels(training, timeline if training.ours else None)

    def found(self) -> dict[str, Any]:
        """`steps`, `first_s`, `ended`, and `predicted` where there is a plan."""
        planned = self._plan and self.first_s
        predicted = {"predicted": asdict(read_plan(Path(self._plan)))} if planned else {}
        return {"steps": self.steps, "first_s": self.first_s, "ended": self.ended} | predicted


def _offloading(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend=ssd_fx.backend, options=options)


def _inductor(layer: torch.nn.Module) -> Any:
    return torch.compile(layer)


def _to_pinned(x: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    where = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, pin_memory=x.is_cuda)
    return x.device, where.copy_(x)


def _from_pinned(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    device, where = packed
    return where.to(device, non_blocking=True)


def _recomputing(share: float) -> Any:
    """Plain Inductor's backend with `activation_memory_budget`. Each is another one to Dynamo, which would run equal
    backends' code for each other."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return compile_fx(gm, inputs)

    return backend


def measure(names: Sequence[str], flags: argparse.Namespace, path: Path, result: dict[str, Any]) -> None:
    """Fills `result` and writes it after every round, and says how far it is: the first round may take minutes.

    `flags.seconds`: no round begins later, counted from the second, which may have to wait for its turn.
    """
    no_events()
    torch._dynamo.config.recompile_limit = max(8, 2 * len(names))  # all ways compile one function
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="ssd_fx-gpu-") as scratch:
        turn = Turn(flags.turns) if flags.turns else None
        if turn and not turn.compile(flags.patience):
            say(f"others measured for {flags.patience} s, so nothing was done")
            return
        training = Training(flags)
        say("model made")
        ways = [Way(name, training, flags, scratch) for name in (PLAIN, *names)]
        started = began
        for number in range(flags.warmup + flags.rounds):
            if number == 1 and turn:
                if not turn.measure(flags.patience):
                    say(f"others compiled or measured for {flags.patience} s, so nothing was measured")
                    return
                say("measures alone")
                started = time.monotonic()
            if time.monotonic() - started > flags.seconds:
                say(f"no more rounds: {flags.seconds} s are over")
                break
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                if way.ended:
                    continue
                way.step(measured=number >= flags.warmup)
                if number == 0 or way.ended:
                    say(f"{way.name}: {way.ended or 'first step'}")
                if way.ended:
                    torch.cuda.empty_cache()
            say(f"round {number + 1} of {flags.warmup + flags.rounds}")
            result["ways"] = {way.name: way.found() for way in ways}
            write_json(f"{path}.json", result)
        for way in ways if flags.profile else ():
            if way.steps and time.monotonic() - started < flags.seconds:
                result["ways"][way.name]["kernels"] = way.profiled(path)
                write_json(f"{path}.json", result)
                say(f"{way.name}: profiled")


def table(result: Mapping[str, Any]) -> str:
    """The measured ways as Markdown: medians, peaks the highest. A ratio is of neighbouring steps."""
    ways = result.get("ways", {})
    lines = [f"# {result['system']['device']}, {result['date']}", "", "Written by benchmarks/gpu_ways.py.", ""]
    lines += [f"- {name}: {text}" for name, text in result["system"].items()]
    lines += [f"- {name}: no steps: {found['ended'] or 'the time was over'}" for name, found in ways.items()
              if not found["steps"]]  # fmt: skip
    if ways and ways[PLAIN]["steps"]:
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        floor = min((found["predicted"]["floor_bytes"] for found in ways.values() if "predicted" in found), default=0)
        lines += [row(name, found, ways[PLAIN]["steps"], floor) for name, found in ways.items() if found["steps"]]
    profiled = {name: found["kernels"] for name, found in ways.items() if "kernels" in found}
    if profiled:
        lines += ["", "Kernels of one more step:", "", "| way | kernels | ms | copies, ms |", "|---|---|---|---|"]
        lines += [f"| {name} | {k['count']} | {k['ms']:.2f} | {k['copies_ms']:.2f} |" for name, k in profiled.items()]
    return "\n".join(lines) + "\n"


def row(name: str, found: Mapping[str, Any], plain: Sequence[Mapping[str, Any]], floor: int) -> str:
    """`floor`: the peak that no offload gets under, 0 if no plan says it."""
    steps = found["steps"]
    ratios = sorted(a["time_s"] / b["time_s"] for a, b in zip(steps, plain, strict=False))
    peak, kept = (max(step["peak_bytes"] for step in each) for each in (steps, plain))
    cells = [name, middle(steps, "time_s", 1e3)]
    cells += [f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"]
    cells += [f"{peak / MIB:.0f}", f"{1 - peak / kept:.1%}" if kept else "-"]
    cells += [f"{(kept - peak) / (kept - floor):.0%}" if kept > floor > 0 else "-"]
    cells += [middle(steps, f"{what}_bytes", 1 / MIB) for what in ("saved", "written", "read")]
    cells += [middle(steps, "stall_s", 1e3), middle(steps, "graph_s", 1e3)]
    said = found.get("predicted")
    cells += [f"{said['step_s'] * 1e3:.1f} ms, {said['peak_bytes'] / MIB:.0f} MiB" if said else "-"]
    return "| " + " | ".join(cells) + " |"


def middle(steps: Sequence[Mapping[str, Any]], name: str, scale: float) -> str:
    return f"{statistics.median(step[name] for step in steps) * scale:.1f}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ways", nargs="+", type=checked, default=["memory:auto"], metavar="WAY")
    add("--rounds", type=int, default=7, help="measured rounds of one step of every way, default %(default)s")
    add("--warmup", type=int, default=4, help="rounds before them, default %(default)s")
    add("--seconds", type=float, default=3600.0, help="begin no round later, default %(default)s")
    add("--profile", action="store_true", help="kernels and timeline of one more step of every way")
    flags = add_model_flags(parser, arguments)
    if len(set(flags.ways)) < len(flags.ways):
        parser.error(f"a way is named twice: {' '.join(flags.ways)}")
    if {ALONE, "kvikio"} <= {engine_of(way) for way in flags.ways}:
        parser.error(f"{ALONE} needs a process of its own: it configures cuFile otherwise than kvikio")
    return flags


def add_model_flags(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses, with the flags of the model, of the machine and of turns as well."""
    add_flags(parser)
    add = parser.add_argument
    add("--family", default="gpt", choices=families.FAMILIES, help="default %(default)s; llama: grouped queries")
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("batch", 8), ("seq", 1024), ("seed", 0)):
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    for name, rate in (("dropout", 0.1), ("lr", 3e-4)):
        add(f"--{name}", type=float, default=rate, help="default %(default)s")
    add("--optimizer", default="adamw", choices=tuple(OPTIMIZERS), help="sgd: no state, for wide models")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--no-amp", dest="amp", action="store_false", help="float32 instead of bfloat16 autocast")
    precision.add_argument("--bfloat16", action="store_true", help="weights too, and no autocast")
    add("--turns", metavar="FILE", help="measure alone, of all processes that name this file")
    add("--patience", type=float, default=600.0, help="seconds to wait for that at most, default %(default)s")
    flags = parser.parse_args(arguments)
    flags.amp &= not flags.bfloat16
    if not flags.print:
        prepare(parser, flags)
    return flags


def model_of(flags: argparse.Namespace) -> str:
    precision = "bfloat16" if flags.bfloat16 else "bfloat16 autocast" if flags.amp else "float32"
    shape = f"{flags.layers} layers, width {flags.width}, {flags.heads} heads, batch {flags.batch} x {flags.seq}"
    return f"{flags.family}, {shape}, {precision}, {flags.optimizer}"


def checked(way: str) -> str:
    """The name of a way that there is. Raises: argparse.ArgumentTypeError for others."""
    engine, _, rest = way.partition(":")
    try:
        if way in (CHECKPOINT, HOST):
            return way
        if engine == RECOMPUTE:
            if not 0.0 <= float(rest) <= 1.0:
                raise ValueError(f"{rest} is no share from 0 to 1")
        elif engine_of(way) in ENGINES:
            Config.make(options_of(way))
        else:
            raise ValueError(f"engines are {', '.join(ENGINES)}")
    except ValueError as error:
        ours = f"[{BLOCKS}]ENGINE:BUDGET[:HOST_BUDGET][,OPTION=VALUE]"
        right = f"right would be {ours}, {RECOMPUTE}:SHARE, {CHECKPOINT} or {HOST}"
        raise argparse.ArgumentTypeError(f"{way!r} is no way: {error}; {right}") from error
    return way


def engine_of(way: str) -> str:
    return way.removeprefix(BLOCKS).partition(":")[0]


def options_of(way: str) -> dict[str, Any]:
    """The options of ssd_fx that a way [blocks:]ENGINE:BUDGET[:HOST_BUDGET][,OPTION=VALUE...] names."""
    first, *more = way.removeprefix(BLOCKS).split(",")
    engine, _, rest = first.partition(":")
    budget, _, host_budget = rest.partition(":")
    options = {"engine": engine, "budget": budget, "host_budget": host_budget or "0"}
    return options | dict(each.partition("=")[::2] for each in more)


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parsed(arguments)
    if flags.print:
        print(*(table(json.loads(Path(path).read_text())) for path in flags.print), sep="\n", end="")
        return
    date, about = datetime.date.today().isoformat(), system(flags) | {"model": model_of(flags)}
    path = results_path(flags, date, about["device"], flags.name or "ways")
    result = {"date": date, "system": about, "flags": vars(flags)}
    measure(flags.ways, flags, path, result)
    print(table(result), end="")


if __name__ == "__main__":
    main()
