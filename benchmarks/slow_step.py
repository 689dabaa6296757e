"""Slow drives, measured: ssd_fx at the peak of a checkpoint per layer, and half way from there to everything kept.

python benchmarks/slow_step.py --dir /mnt/nvme                   # four cases, to demo-out/slow-step (two hours)
python benchmarks/slow_step.py --dir /mnt/nvme --families gpt --gbps 0.3 --precisions fp32
python benchmarks/slow_step.py --dir /mnt/nvme --families gpt --precisions bf16 --width 192 --heads 3 --batch 1
python benchmarks/slow_step.py --dir /mnt/nvme --quick           # a tiny case that only shows that it runs

How it is measured:
- A process for each way, in rounds of one step of each (workers.py): plain Inductor, a checkpoint per layer, PyTorch's
  `activation_memory_budget`, and ssd_fx twice for each rate of the drive. Times are compared within a round.
- The drive is that of DIR, held to a rate each way on its own (held.py). The planner is told that rate. The rates of
  compute are measured before each case, as `ssd-fx calibrate` does, and all predictions of the case use these. They are
  measured again after its last round: a virtual machine may have become faster or slower.
- The live peak of the checkpoint and of Inductor is measured first. Ours gets the share whose limit is that peak, by
  the predicted floor and the predicted peak of everything kept.
- PyTorch's budget is the share that is predicted to be fastest of those with no higher a peak than the checkpoint's,
  and the one with the lowest peak if there is none.
- Predicted and measured steps beside each other are of forward and backward. Peaks are the highest of all rounds.
Every case is a JSON file, so a second run goes on where the first ended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import held  # neighbours of this file
import torch
from families import Family, make
from forecasts import Figure, of_rival
from frontier import ROUNDING
from pareto import read
from predicted import read as read_plan
from rivals import KEEP, Call, Rival, rivals
from system import MIB, announce, write_json
from training import Model, Step, Task, train_gpt
from workers import Workers, ratios

from ssd_fx.calibration.calibrate import calibrated
from ssd_fx.config import Config
from ssd_fx.rivals import BUDGETED, CHECKPOINT
from ssd_fx.runtime.config import parse

GPT = Model(12, 384, 6, 8, 512, 0.0, False, 0, 3e-4, "gpt")
LLAMA = Model(8, 512, 8, 4, 512, 0.0, False, 0, 3e-4, "llama", 8192)
TINY = {"layers": 2, "width": 128, "heads": 4, "batch": 2, "seq": 128}
SIZES = ("width", "heads", "batch")  # what flags may change of these models
MIN_BYTES = 65_536
INDUCTOR = "inductor"


@dataclass(frozen=True)
class Case:
    """A model, and drives of so many GB/s each way."""

    model: Model
    gbps: tuple[float, ...]

    @property
    def stem(self) -> str:
        of = self.model
        shape = f"{of.layers}x{of.width}-{of.batch}x{of.seq}"
        drives = "-".join(f"{each:g}" for each in self.gbps)
        return f"{of.family}-{shape}-{'bf16' if of.amp else 'fp32'}-{drives}"


@dataclass(frozen=True)
class Ours:
    """A way to train with ssd_fx: whether at the checkpoint's peak, or half way from there to everything; the drive."""

    tight: bool
    gbps: float

    def __str__(self) -> str:
        where = "at the checkpoint's peak" if self.tight else "half way to everything"
        return f"ssd_fx {where}, {self.gbps:g} GB/s"


def call_of(model: Model) -> Call:
    with torch.device("meta"):
        shape = train_gpt.Shape(model.layers, model.width, model.heads, model.seq, model.dropout)
        text = torch.empty(model.batch, model.seq, dtype=torch.int64)
        return make(model.family, shape, model.vocabulary), (text, text)


def with_drive(rates: Mapping[str, object], gbps: float) -> dict[str, object]:
    """The option `machine`: these rates, but for a drive of so many GB/s each way."""
    return {**rates, "write_bw": gbps * 1e9, "read_bw": gbps * 1e9}


def forecasts(model: Model, rates: Mapping[str, object], shares: Sequence[float]) -> dict[str, Figure]:
    """Of the rivals, by their names."""
    wanted = [each for each in rivals(shares) if each.name in (KEEP, CHECKPOINT) or each.name.startswith(BUDGETED)]
    with torch.autocast("cpu", torch.bfloat16, enabled=model.amp):
        return {each.name: _forecast(model, each, rates) for each in wanted}


def _forecast(model: Model, rival: Rival, rates: Mapping[str, object]) -> Figure:
    return of_rival(call_of(model), rival, rates, more={"min_bytes": MIN_BYTES})


def share_at(peak_bytes: float, floor: int, everything: int) -> float:
    """The budget of ssd_fx whose limit is that peak, in whole thousandths, from 0 to 1."""
    share = (peak_bytes - floor) / max(everything - floor, 1)
    return int(1000 * min(max(share, 0.0), 1.0)) / 1000


def budget_of(found: Mapping[str, Figure]) -> float:
    """PyTorch's share that is predicted to be fastest of those within the checkpoint's peak, else the lowest of all."""
    shares = {float(n.removeprefix(BUDGETED)): f for n, f in found.items() if n.startswith(BUDGETED)}
    fits = [share for share, each in shares.items() if each.peak_bytes <= ROUNDING * found[CHECKPOINT].peak_bytes]
    if fits:
        return min(fits, key=lambda share: shares[share].step_s)
    return min(shares, key=lambda share: shares[share].peak_bytes)


def rates_now(directory: str) -> dict[str, Any]:
    """The rates of this machine, measured anew."""
    options = parse(Config.make({"dirs": [directory]}).runtime_json())
    return calibrated(options, torch.device("cpu"), again=True).rates()


def measure(case: Case, flags: argparse.Namespace) -> dict[str, Any]:
    rates = rates_now(flags.dir)
    said = forecasts(case.model, rates, flags.shares)
    keep, share = said[KEEP], budget_of(said)
    budgeted = f"{BUDGETED} {share:g}"
    tasks = {INDUCTOR: Task(case.model, "inductor"), CHECKPOINT: Task(case.model, "checkpoint")}
    tasks |= {budgeted: Task(case.model, "recompute", share)}
    names = {INDUCTOR: KEEP, CHECKPOINT: CHECKPOINT, budgeted: budgeted}
    with tempfile.TemporaryDirectory(prefix="ssd_fx-slow-") as scratch, Workers(tasks) as workers:
        workers.compile()
        first = list(workers.rounds(flags.warmup))
        lowest, highest = (max(steps[name].peak_bytes for steps in first) for name in (CHECKPOINT, INDUCTOR))
        ways = [Ours(tight, gbps) for gbps in case.gbps for tight in (True, False)]
        asked = {str(way): lowest if way.tight else (lowest + highest) / 2 for way in ways}
        shares = {name: share_at(peak, keep.floor_bytes, keep.peak_bytes) for name, peak in asked.items()}
        dumps = {str(way): Path(scratch) / str(number) for number, way in enumerate(ways)}
        for way in ways:
            own = {"engine": held.NAME, "dirs": [flags.dir], "min_bytes": MIN_BYTES, "dump": str(dumps[str(way)])}
            own |= {"machine": with_drive(rates, way.gbps), "budget": shares[str(way)]}
            workers.start(str(way), Task(case.model, "ssd_fx", options=own, held_gbps=way.gbps))
        plans = {name: read_plan(path) for name, path in dumps.items()}
        rounds = list(workers.rounds(flags.warmup + flags.rounds))[flags.warmup :]
    predicted = {name: asdict(said[rival]) for name, rival in names.items()}
    for name, plan in plans.items():
        predicted[name] = asdict(Figure(plan.peak_bytes, plan.step_s, 0, plan.floor_bytes))
    steps = [{name: asdict(step) for name, step in each.items()} for each in rounds]
    found = {"shares": shares, "rates": rates, "rates_after": rates_now(flags.dir), "predicted": predicted}
    return found | {"asked_bytes": asked, "rounds": steps}


def table(title: str, found: Mapping[str, Any]) -> str:
    """Markdown. Ratios are of steps of one round, with the quartiles."""
    head = "| | s | to Inductor (quartiles) | CPU time | live peak, MiB | predicted | asked | forward and backward, s "
    head += "| predicted | waits, s | written, MiB |"
    rounds = [{name: Step(**step) for name, step in each.items()} for each in found["rounds"]]
    dtype = "bfloat16" if found["model"]["amp"] else "float32"
    before, after = (found[name]["flops_by_dtype"][dtype] / 1e9 for name in ("rates", "rates_after"))
    speed = f"Products ran at {before:.3g} GFLOP/s before the rounds, and at {after:.3g} after them."
    lines = [f"### {title}", "", speed, "", head, "|---|" + "---|" * 10]
    return "\n".join([*lines, *(row(name, rounds, found) for name in rounds[0])])


def row(name: str, rounds: Sequence[Mapping[str, Step]], found: Mapping[str, Any]) -> str:
    steps, reference = [each[name] for each in rounds], [each[INDUCTOR] for each in rounds]
    said = found["predicted"][name]
    cells = [name, f"{median(s.time_s for s in steps):.3f}", *ratios(steps, reference)]
    cells += [f"{max(s.peak_bytes for s in steps) / MIB:.1f}", f"{said['peak_bytes'] / MIB:.1f}"]
    cells += [f"{found['asked_bytes'][name] / MIB:.1f}" if name in found["asked_bytes"] else ""]
    cells += [f"{median(s.graph_s for s in steps):.3f}", f"{said['step_s']:.3f}"]
    cells += [f"{median(s.stall_s for s in steps):.3f}", f"{median(s.written_bytes for s in steps) / MIB:.1f}"]
    return f"| {' | '.join(cells)} |"


def cases(flags: argparse.Namespace) -> list[Case]:
    models: dict[Family, Model] = {"gpt": GPT, "llama": LLAMA}
    sizes = {name: getattr(flags, name) for name in SIZES if getattr(flags, name)} | (TINY if flags.quick else {})
    made = product(flags.families, flags.precisions)
    return [Case(Model(**(asdict(models[f]) | sizes | {"amp": p == "bf16"})), tuple(flags.gbps)) for f, p in made]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", required=True, help="a directory on the drive")
    add("--families", nargs="+", choices=("gpt", "llama"), default=["gpt", "llama"])
    add("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"], help="bf16: autocast")
    add("--gbps", nargs="+", type=float, default=None, help="of the drive, each way; default: 0.1 0.3 1")
    for name in SIZES:
        add(f"--{name}", type=int, default=None, help="of the models, for a processor that is slow in a precision")
    add("--rounds", type=int, default=None, help="default: 15, with --quick 3")
    add("--warmup", type=int, default=3, help="rounds before them, default %(default)s")
    add("--json-dir", type=Path, default=Path("demo-out/slow-step"), help="default %(default)s")
    add("--again", action="store_true", help="measure what has a file, too")
    add("--quick", action="store_true", help="two layers, narrow")
    flags = parser.parse_args(arguments)
    flags.gbps = flags.gbps or ([0.3] if flags.quick else [0.1, 0.3, 1.0])
    flags.rounds = flags.rounds or (3 if flags.quick else 15)
    flags.shares = (0.1, 0.5) if flags.quick else tuple(i / 10 for i in range(11))
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parsed(arguments)
    flags.json_dir.mkdir(parents=True, exist_ok=True)
    where = announce(flags.dir)
    tables = []
    for case in cases(flags):
        path = flags.json_dir / f"{case.stem}.json"
        found = {} if flags.again else read(path)
        if len(found.get("rounds", ())) < flags.rounds or "rates_after" not in found:
            found = {"system": where, "model": asdict(case.model)} | measure(case, flags)
            write_json(path, found)
        tables.append(table(str(case.model), found))
        print(f"\n{tables[-1]}", flush=True)
    (flags.json_dir / "slow-step.md").write_text("\n\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
