"""Never worse than checkpointing? What is predicted of ssd_fx and of its rivals at equal peaks of memory.

python benchmarks/pareto.py                             # all models and rates, to demo-out/pareto (an hour or two)
python benchmarks/pareto.py --quick                     # two small models, one drive (a few minutes)
python benchmarks/pareto.py --models gpt llama --machines 80 --gbps 2 5 50
python benchmarks/pareto.py --models llama --layers 16 --vocabulary 128256 --gbps 5   # other sizes than the default
python benchmarks/pareto.py --h200                      # three shapes that an H200 has trained, at its rates

Nothing runs: the models have no data, and the planner predicts all steps for the same rates. Each holds forward, loss
and backward. A rival is the same model with checkpoints, or cut by PyTorch under its `activation_memory_budget`; or
ssd_fx that computes nothing again. Ours is planned within each rival's peak, and within peaks in equal steps.

Every case is a JSON file, so a second run goes on where the first ended. Files of an older planner stay: `--again`
plans all cases of the flags afresh, and `--ours-again` leaves the rivals as they are. The tables go to pareto.md beside
them, and a picture for each model. The exit status is 1 if a rival is faster by more than 0.5%, or if our time goes up
where the peak does.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import frontier  # neighbours of this file
import h200
from forecasts import Figure, limit, of_rival, ours
from frontier import At, Case
from rivals import SIZES, Sizes, made, rivals
from system import commit, write_json

MACHINES: dict[str, dict[str, float]] = {  # by their TFLOP/s
    "80": {"flops": 80e12, "memory_bw": 1e12, "latency_s": 1e-4},
    "400": {"flops": 400e12, "memory_bw": 3e12, "latency_s": 1e-4},
}
GBPS = {"80": (0.5, 2.0, 5.0, 10.0, 20.0, 50.0), "400": (10.0, 20.0, 50.0)}
OFFLOADED = (0.0, 0.25, 0.5, 0.75)  # shares that stay of the rival that only offloads
QUICK = {"layers": 4, "width": 1024, "heads": 16, "seq": 2048, "vocabulary": 4096}


@dataclass(frozen=True)
class Planned:
    """One case: a model on a machine, one of `MACHINES`, whose drive has so many GB/s each way."""

    sizes: Sizes
    machine: str
    gbps: float

    @property
    def rates(self) -> dict[str, float]:
        return MACHINES[self.machine] | {"write_bw": self.gbps * 1e9, "read_bw": self.gbps * 1e9}

    @property
    def machine_words(self) -> str:
        rates = MACHINES[self.machine]
        return f"{rates['flops'] / 1e12:g} TFLOP/s, {rates['memory_bw'] / 1e12:g} TB/s"

    @property
    def compute_stem(self) -> str:
        """The name of a file with what does not depend on the drive."""
        of = self.sizes
        shape = f"{of.layers}x{of.width}-{of.batch}x{of.seq}" + (f"-{of.vocabulary}" if of.vocabulary else "")
        return f"{of.name}-{shape}-{self.machine}"

    @property
    def stem(self) -> str:
        return f"{self.compute_stem}-{self.gbps:g}"


def rivals_of(case: Planned, flags: argparse.Namespace) -> dict[str, Figure]:
    """Those that need no drive, from their file if it has them."""
    path = flags.json_dir / f"{case.compute_stem}-rivals.json"
    stored = read(path) if not flags.again else {}
    found = {name: Figure(**figure) for name, figure in stored.items()}
    wanted = rivals(flags.shares)
    for rival in (each for each in wanted if each.name not in found):
        found[rival.name] = of_rival(made(case.sizes), rival, case.rates)
        write_json(path, {name: asdict(figure) for name, figure in found.items()})
    return {rival.name: found[rival.name] for rival in wanted}


def plan(case: Planned, flags: argparse.Namespace) -> Case:
    """All figures of a case. Ours is asked for at once, so that the planner may share its work."""
    others = rivals_of(case, flags)
    offloaded = ours(made(case.sizes), OFFLOADED, case.rates, recompute=False)
    others |= frontier.renamed(offloaded, OFFLOADED)
    peaks = [float(rival.peak_bytes) for rival in others.values()]
    peaks += frontier.limits(others, flags.points)
    found = [At(peak, each) for peak, each in zip(peaks, _ours(case, peaks), strict=True)]
    equal = dict(zip(others, found, strict=False))
    label = f"{case.sizes}: {case.machine_words}, {case.gbps:g} GB/s"
    return Case(label, label, case.gbps, others, equal, found[len(others) :])


def _ours(case: Planned, peaks: Sequence[float]) -> list[Figure | None]:
    distinct = sorted(set(peaks))
    found = dict(zip(distinct, ours(made(case.sizes), [limit(p) for p in distinct], case.rates), strict=True))
    return [found[peak] for peak in peaks]


def cases(flags: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """All cases of the flags, with the names of their models; from their files if they are there."""
    for name in flags.models:
        sizes = replace(SIZES[name], **_given(flags))
        for machine in flags.machines:
            for gbps in flags.gbps or GBPS[machine]:
                yield name, case_of(Planned(sizes, machine, gbps), flags)


def case_of(planned: Planned, flags: argparse.Namespace) -> Case:
    """From its file, if that is of as many points and shares."""
    path = flags.json_dir / f"{planned.stem}.json"
    asked = {"points": flags.points, "shares": list(flags.shares)}
    stored = read(path)
    if stored.get("asked") == asked and not (flags.again or flags.ours_again):
        return Case.read(stored["case"])
    began = time.monotonic()
    case = plan(planned, flags)
    took = round(time.monotonic() - began, 1)
    write_json(path, {"asked": asked, "commit": commit(), "took_s": took, "case": asdict(case)})
    print(f"{took:6.1f} s  {planned.stem}: {frontier.verdict(case)}", file=sys.stderr, flush=True)
    return case


def read(path: Path) -> dict[str, Any]:
    """What was written there; nothing if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _given(flags: argparse.Namespace) -> dict[str, Any]:
    names = ("layers", "width", "heads", "batch", "seq", "vocabulary")
    return {name: value for name in names if (value := getattr(flags, name)) is not None}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(SIZES), default=None, help="default: all; with --quick gpt and llama")
    add("--machines", nargs="+", choices=list(MACHINES), default=None, help="by their TFLOP/s; default: all")
    add("--gbps", nargs="+", type=float, default=[], help=f"of the drive, each way; default {GBPS}")
    for name in ("layers", "width", "heads", "batch", "seq", "vocabulary"):
        add(f"--{name}", type=int, help="of all models; default: that of each")
    add("--points", type=int, default=12, help="peaks of ours beside those of rivals, default %(default)s")
    add("--json-dir", type=Path, default=Path("demo-out/pareto"), help="where results are, default %(default)s")
    add("--again", action="store_true", help="plan what has a file, too")
    add("--ours-again", action="store_true", help="the same, but rivals that need no drive come from their file")
    add("--quick", action="store_true", help="small models, one machine, one drive, few budgets")
    add("--h200", action="store_true", help="only three shapes at the rates of an H200, as on a GPU")
    flags = parser.parse_args(arguments)
    flags.shares = (0.0, 0.5) if flags.quick else tuple(i / 10 for i in range(11))
    if flags.quick:
        for name, value in QUICK.items():
            setattr(flags, name, getattr(flags, name) or value)
        flags.points, flags.gbps = min(flags.points, 6), flags.gbps or [5.0]
    flags.models = flags.models or (["gpt", "llama"] if flags.quick else list(SIZES))
    flags.machines = flags.machines or (["80"] if flags.quick else list(MACHINES))
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parsed(arguments)
    if flags.h200:
        return h200.report()
    logging.getLogger("torch").setLevel(logging.ERROR)  # a selective checkpoint is a warning of many lines
    flags.json_dir.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Case]] = {}
    for name, case in cases(flags):
        found.setdefault(name, []).append(case)
        (flags.json_dir / f"{name}.svg").write_text(frontier.picture(found[name]))
    every = [case for each in found.values() for case in each]
    tables = "\n\n".join([*map(frontier.table, every), frontier.worst_of(every)]) + "\n"
    (flags.json_dir / "pareto.md").write_text(tables)
    print(tables, end="")
    return 0 if all(case.holds for case in every) else 1


if __name__ == "__main__":
    sys.exit(main())
