"""Memory against step time: keeping, recomputing, checkpointing, offloading, and all of them planned jointly.

python benchmarks/budget_curve.py --dir /mnt/nvme --plot docs/budget_curve.svg
python benchmarks/budget_curve.py --dir /mnt/nvme --modes joint recompute --budgets 0.4 0 --rounds 7

- keep: plain Inductor.
- recompute: plain Inductor under torch's `activation_memory_budget`, with its own solver; 0 recomputes everything.
- checkpoint: plain Inductor with torch.utils.checkpoint around every block.
- offload: ssd_fx under the budget, without recomputing.
- joint: ssd_fx under the budget, choosing to keep, recompute or offload.

How it is measured: one process for each mode and budget, in rounds of one step of each (workers.py). The peak is the
highest of all steps, load buffers included. Step times are compared within a round only: with keep's for the table and
the plot, with each other for the verdict (curve.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import curve
import svg
from system import machine
from training import Model, Step, Task, train_gpt
from workers import Workers

MODES = ("keep", "recompute", "checkpoint", "offload", "joint")
WITHOUT_BUDGET = ("keep", "checkpoint")
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


def tasks(flags: argparse.Namespace) -> dict[tuple[str, float | None], Task]:
    """What to run; `keep` always, because everything is compared with it."""
    model, found = Model.of(flags), {}
    for mode in MODES:
        if mode in flags.modes or mode == "keep":
            for budget in (None,) if mode in WITHOUT_BUDGET else flags.budgets:
                found[mode, budget] = task(model, mode, budget, flags.dir)
    return found


def task(model: Model, mode: str, budget: float | None, directory: str | None) -> Task:
    if mode == "keep":
        return Task(model, "inductor")
    if mode == "checkpoint":
        return Task(model, "checkpoint")
    assert budget is not None
    if mode == "recompute":
        return Task(model, "recompute", budget)
    options: dict[str, Any] = {"budget": budget} | ({"dirs": [directory]} if directory else {})
    choice = {"recompute": mode == "joint"}
    return Task(model, "ssd_fx", options=options | choice)


def points(names: Sequence[tuple[str, float | None]], rounds: Sequence[Mapping[str, Step]]) -> list[curve.Point]:
    """One point for every worker, in the order of `names`."""
    keep = [steps[label("keep", None)].time_s for steps in rounds]
    found = []
    for mode, budget in names:
        taken = [steps[label(mode, budget)] for steps in rounds]
        peak = max(s.peak_bytes for s in taken)
        ratios = tuple(step.time_s / base for step, base in zip(taken, keep, strict=True))
        found.append(curve.Point(mode, budget, peak, tuple(s.time_s for s in taken), ratios))
    return found


def losses(steps: Mapping[str, Step]) -> str:
    """Equal ones together."""
    names: dict[float, list[str]] = {}
    for name, step in steps.items():
        names.setdefault(step.loss, []).append(name)
    return "; ".join(f"{loss:.6f} ({', '.join(those)})" for loss, those in names.items())


def label(mode: str, budget: float | None) -> str:
    return mode if budget is None else f"{mode} {budget:g}"


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_gpt.add_model_flags(parser)
    parser.set_defaults(layers=4, width=256, heads=4)
    add = parser.add_argument
    add("--modes", nargs="+", choices=MODES, default=MODES, help="default: all; keep is always run")
    add("--budgets", nargs="+", type=share, default=BUDGETS, help="shares from 1 to 0, default %(default)s")
    add("--rounds", type=int, default=15, help="measured rounds, default %(default)s")
    add("--warmup", type=int, default=2, help="rounds before them, default %(default)s")
    add("--plot", metavar="OUT", help="write the plot to this SVG file")
    return parser.parse_args(arguments)


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value


def main() -> None:
    flags = parse_flags(sys.argv[1:])
    where = machine(flags.dir) | {"model": str(Model.of(flags)), "rounds": f"{flags.rounds} behind {flags.warmup}"}
    for name, text in where.items():
        print(f"{name:10} {text}", flush=True)
    todo = tasks(flags)
    with Workers({label(*name): task for name, task in todo.items()}) as workers:
        first = workers.compile()
        rounds = list(workers.rounds(flags.warmup + flags.rounds))[flags.warmup :]
    found = points(list(todo), rounds)
    print(f"\nmedians of {len(rounds)} rounds; peaks are the highest of all steps\n\n{curve.table(found)}\n")
    joint = [point for point in found if point.mode == "joint"]
    compared = curve.dominance(joint, [point for point in found if point.mode != "joint"])
    print(curve.verdict(compared, len(joint), len(rounds)))
    print(f"losses of the last round: {losses(rounds[-1])}")
    if flags.plot:
        Path(flags.plot).write_text(plot(found, str(Model.of(flags))))
    if flags.json:
        steps = [{name: asdict(step) for name, step in each.items()} for each in rounds]
        figures = {"points": [asdict(p) for p in found], "worse": [asdict(c) for c in compared], "first_step_s": first}
        result = {"system": where, "flags": vars(flags), **figures, "rounds": steps}
        Path(flags.json).write_text(json.dumps(result, indent=1) + "\n")


def plot(found: Sequence[curve.Point], model: str) -> str:
    axes = {"x": "peak of forward and backward, MiB", "y": "step time / keep's (bars: quartiles)"}
    return svg.plot(curve.marks(found), title=f"GPT: {model}", **axes)


if __name__ == "__main__":
    main()
