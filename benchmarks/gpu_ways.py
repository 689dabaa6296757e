"""On a GPU: one GPT trained in several ways that take turns, so that one table shows what each saves and costs.

python benchmarks/gpu_ways.py --dir /mnt/nvme --layers 2 --width 12288 --heads 96 --batch 16 --optimizer sgd \\
    --ways memory:auto memory:0 recompute:0.5
python benchmarks/gpu_ways.py --print FILE.json ...   # the tables of what was measured before

A way is ENGINE:BUDGET[:HOST_BUDGET] of ssd_fx, or recompute:SHARE, which is plain Inductor with that
`activation_memory_budget`. Plain Inductor is always there. How a step is measured: gpu.py. No event is around any node.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu import parse_flags as step_flags  # neighbours of this file
from gpu import slug, system
from gpu_report import middle
from gpu_steps import Training, kernels, no_events
from predicted import read as read_plan
from system import MIB, write_json

from ssd_fx.runtime.engines.registry import ENGINES

PLAIN, RECOMPUTE = "plain", "recompute"
COLUMNS = ("way", "step ms", "of plain", "peak MiB", "less", "saved MiB", "written", "read", "stall ms", "predicted")


class Way:
    """A training, and what was measured of it. `first_s`: the first step, which compiles and pins memory."""

    def __init__(self, name: str, flags: argparse.Namespace, scratch: str) -> None:
        self.name, self.steps, self.first_s = name, list[dict[str, Any]](), 0.0
        engine, _, rest = name.partition(":")
        self._share, self._plan = 1.0, ""
        if name == PLAIN:
            self.training = Training(flags, None)
        elif engine == RECOMPUTE:
            self.training, self._share = Training(flags, None), float(rest)
            model = self.training.model  # with other options, or Dynamo would run plain Inductor's graph for it too
            self.training.compiled = torch.compile(model, options={"shape_padding": True})
        else:
            own = copy.copy(flags)
            own.budget, _, host = rest.partition(":")
            own.host_budget = host or "0"
            self._plan = tempfile.mkdtemp(dir=scratch)
            self.training = Training(own, engine, self._plan)

    def step(self, measured: bool) -> None:
        with torch._functorch.config.patch(activation_memory_budget=self._share):
            made = self.training.step()
        self.first_s = self.first_s or made.time_s
        if measured:
            self.steps.append(asdict(made))

    def found(self) -> dict[str, Any]:
        """`steps`, `first_s`, and `predicted` where there is a plan."""
        predicted = {"predicted": asdict(read_plan(Path(self._plan)))} if self._plan else {}
        return {"steps": self.steps, "first_s": self.first_s} | predicted


def measure(names: Sequence[str], flags: argparse.Namespace, path: Path, result: dict[str, Any]) -> None:
    """Fills `result` and writes it after every round: what was measured is kept if the time ends. Says how far it is,
    for a wide model compiles, and pins host memory, for minutes."""
    no_events()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="ssd_fx-gpu-") as scratch:
        ways = [Way(name, flags, scratch) for name in (PLAIN, *names)]
        say("models made")
        for number in range(flags.warmup + flags.pairs):
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                way.step(number >= flags.warmup)
                if number == 0:
                    say(f"{way.name}: first step")
            say(f"round {number + 1} of {flags.warmup + flags.pairs}")
            if number >= flags.warmup:
                result["ways"] = {way.name: way.found() for way in ways}
                write_json(f"{path}.json", result)
        for way in ways if flags.profile else ():
            named = Path(f"{path}-{slug(way.name.replace(':', ' '))}.trace.json.gz")
            result["ways"][way.name]["kernels"] = kernels(way.training, named)
            write_json(f"{path}.json", result)
            say(f"{way.name}: profiled")


def table(result: Mapping[str, Any]) -> str:
    """The measured ways as Markdown: medians, peaks the highest."""
    ways = result["ways"]
    plain = ways[PLAIN]["steps"]
    kept = max(1, *(step["peak_bytes"] for step in plain))
    lines = [f"# {result['system']['device']}, {result['date']}", "", "Written by benchmarks/gpu_ways.py.", ""]
    lines += [f"- {name}: {text}" for name, text in result["system"].items()]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for name, found in ways.items():
        steps = found["steps"]
        ratios = sorted(a["time_s"] / b["time_s"] for a, b in zip(steps, plain, strict=True))
        peak = max(step["peak_bytes"] for step in steps)
        cells = [name, middle(steps, "time_s", 1e3)]
        cells += [f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"]
        cells += [f"{peak / MIB:.0f}", f"{1 - peak / kept:.1%}"]
        cells += [middle(steps, f"{what}_bytes", 1 / MIB) for what in ("saved", "written", "read")]
        cells += [middle(steps, "stall_s", 1e3)]
        said = found.get("predicted")
        cells += [f"{said['step_s'] * 1e3:.1f} ms, {said['peak_bytes'] / MIB:.0f} MiB" if said else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", type=checked, default=["memory:auto"], metavar="WAY")
    parser.add_argument("--print", nargs="+", metavar="JSON", help="only print what these say")
    own, others = parser.parse_known_args(arguments)
    if own.print:
        print(*(table(json.loads(Path(path).read_text())) for path in own.print), sep="\n", end="")
        return
    flags = step_flags(["--steps-only", "--untimed", "--predicted", *others])
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here: torch sees no CUDA device, so nothing was run and nothing was written")
    Path(flags.dir).mkdir(parents=True, exist_ok=True)
    date, about = datetime.date.today().isoformat(), system(flags)
    about["model"] = about["model"].partition(", budget")[0]
    path = Path(flags.results) / f"{date}-{slug(about['device'])}-{flags.name or 'ways'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"date": date, "system": about, "flags": vars(flags)}
    measure(own.ways, flags, path, result)
    print(table(result))


def checked(way: str) -> str:
    """The name of a way that there is. Raises: argparse.ArgumentTypeError for others."""
    engine, _, rest = way.partition(":")
    if not rest or engine not in (RECOMPUTE, *ENGINES):
        raise argparse.ArgumentTypeError(
            f"{way!r} is no way; right would be ENGINE:BUDGET, ENGINE:BUDGET:HOST_BUDGET or {RECOMPUTE}:SHARE, "
            f"with an engine of {', '.join(ENGINES)}"
        )
    return way


if __name__ == "__main__":
    main()
