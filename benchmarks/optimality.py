"""How far the planner is from the optimum: predicted step time over the least that a mixed-integer program allows.

python benchmarks/optimality.py                               # 200 random steps, six budgets; half an hour of two cores
python benchmarks/optimality.py --instances 0 --layered 60    # steps of equal layers, drives slower than compute
python benchmarks/optimality.py --instances 0 --layered 60 --bounds FILE    # the same, and again without the programs
python benchmarks/optimality.py --models gpt bert t5          # joint graphs (bert and t5 need transformers)
python benchmarks/optimality.py --instances 0 --models gpt --speeds half tenth --recompute --rows 80 --time-limit 120

`bound` is the program's dual bound, `found` its best solution. Lanes in it can be interrupted, ours cannot: where a
random step's plan is not within 2%, the bound is that of the program that knows so too
(tests/passes/planner/sequenced.py).
A layered step's bound is that of the first program as far as `--time-limit` proves it; of up to 13 items it is that of
the second one where the first is not near. `unproven` are those where the best solution is not within 1% of the bound.
`--bounds` adds every bound to a file as soon as it is found, and reads there what an earlier run has found in as much
time. So a run can be stopped and go on, and another planner is compared in minutes. The file is for one set of
instances.
The random steps are dealt out to processes, which share the machine: `plan s` is longer for it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the program and the instances are those of the tests

from system import announce

from ssd_fx.passes.planner.solve import solve
from tests.passes.planner.instances import BUDGETS, Instance, limits, random_instance
from tests.passes.planner.layered import layered_instance
from tests.passes.planner.optimum import optimum
from tests.passes.planner.sequenced import Sequenced, least_seconds

PROVEN = 1.01  # a solution that is as near to a bound proves it
FEW = 13  # items, of which the program with lanes in order says something in a minute

# Imported by name: it imports examples/, which mypy knows under another name.
real_graphs: Any = importlib.import_module("tests.passes.real_graphs")


@dataclass(frozen=True)
class Row:
    """One instance at one budget; `seconds`, `bound` and `found` are predicted, `plan_s` and `program_s` measured."""

    name: str
    share: float
    seconds: float
    bound: float
    found: float
    plan_s: float
    program_s: float

    @property
    def proven(self) -> bool:
        return self.found <= PROVEN * self.bound

    @property
    def ratio(self) -> float:
        return self.seconds / self.bound

    @property
    def ratio_found(self) -> float:
        return self.seconds / self.found


@dataclass(frozen=True)
class Known:
    """What the program found out about one instance at one budget in `time_limit` seconds; its `choices` by letter."""

    name: str
    share: float
    lower_bound: float
    seconds: float
    time_limit: float
    choices: str = ""

    @property
    def proven(self) -> bool:
        return self.seconds <= PROVEN * self.lower_bound

    @staticmethod
    def read(path: Path, name: str, share: float, time_limit: float) -> Known | None:
        """What is known from as much time, or for good."""
        lines = path.read_text().splitlines() if path.exists() else []
        found = [Known(**json.loads(line)) for line in lines]
        usable = [k for k in found if (k.name, k.share) == (name, share) and (k.proven or k.time_limit >= time_limit)]
        return usable[-1] if usable else None

    def append(self, path: Path) -> None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def compare_small(seed: int, share: float) -> Row:
    instance = random_instance(seed)
    step, at = instance.step, limits(instance.step, share)
    begin = time.perf_counter()
    plan = solve(step, instance.machine, limit=at.memory, share_bytes=at.kept)
    middle = time.perf_counter()
    seconds = plan.seconds
    bound = least_seconds(step, instance.machine, at.memory, at.kept, seconds)
    return Row(instance.name, share, seconds, bound, bound, middle - begin, time.perf_counter() - middle)


def compare_layered(seed: int, share: float, time_limit: float, bounds: Path | None) -> Row:
    return compare(layered_instance(seed), share, None, time_limit, whole=True, bounds=bounds)


def compare(
    instance: Instance,
    share: float,
    rows: int | None,
    time_limit: float,
    *,
    whole: bool,
    bounds: Path | None = None,
) -> Row:
    """`whole`: the budget is about the peak alone, as in a graph with its loss. `bounds`: a file of `Known`."""
    at, step, machine = limits(instance.step, share, whole=whole), instance.step, instance.machine
    begin = time.perf_counter()
    plan = solve(step, machine, limit=at.memory, share_bytes=at.kept)
    middle = time.perf_counter()
    seconds, kept = plan.seconds, None if whole else at.kept
    known = Known.read(bounds, instance.name, share, time_limit) if bounds else None
    if known is None:
        best = optimum(step, machine, at.memory, kept, rows=rows, time_limit=time_limit, plan_s=seconds)
        bound = best.lower_bound
        if len(step.items) <= FEW and seconds > PROVEN * bound:
            best = optimum(step, machine, at.memory, kept, time_limit=time_limit, plan_s=seconds, program=Sequenced)
            bound = max(bound, best.lower_bound)
        letters = "".join(choice.value[0] for choice in best.choices)
        known = Known(instance.name, share, bound, min(best.seconds, seconds), time_limit, letters)
        if bounds:
            known.append(bounds)
    found = min(known.seconds, seconds)
    return Row(instance.name, share, seconds, known.lower_bound, found, middle - begin, time.perf_counter() - middle)


def print_random(rows: list[Row], worst: int) -> None:
    print("budget  instances  median     p90     p95   worst  over 2%  over 5%  unproven  plan s (median)")
    for share in (*sorted({row.share for row in rows}), None):
        at = [row for row in rows if share in (row.share, None)]
        ratios = sorted(row.ratio for row in at)
        over = [sum(r > limit for r in ratios) for limit in (1.02, 1.05)]
        figures = [statistics.median(ratios), *(_quantile(ratios, q) for q in (0.9, 0.95, 1.0))]
        plan_s = statistics.median(row.plan_s for row in at)
        line = " ".join(f"{f:7.4f}" for f in figures)
        unproven = sum(not row.proven for row in at)
        name = "all" if share is None else f"{share:.1f}"
        print(f"{name:>6s} {len(at):10d} {line} {over[0]:8d} {over[1]:8d} {unproven:9d} {plan_s:16.3f}")
    print("\nworst, plan/bound and plan/found:")
    for row in _sorted(rows)[:worst]:
        print(f"    {row.name}@{row.share}  {row.ratio:.4f}  {row.ratio_found:.4f}")


def print_real(rows: Iterable[Row]) -> None:
    print("model           budget   plan ms  bound ms  found ms  plan/bound  plan/found  plan s  program s")
    for row in rows:
        ms = " ".join(f"{1e3 * s:9.3f}" for s in (row.seconds, row.bound, row.found))
        ratios = f"{row.ratio:11.4f} {row.ratio_found:11.4f}"
        print(f"{row.name:14s} {row.share:7.1f} {ms} {ratios} {row.plan_s:7.1f} {row.program_s:10.1f}", flush=True)


def _sorted(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.ratio)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200, help="random steps")
    parser.add_argument("--layered", type=int, default=0, help="random steps of equal layers with slow drives")
    parser.add_argument("--seed", type=int, default=0, help="of the first random step")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes, default %(default)s")
    parser.add_argument("--worst", type=int, default=10, help="print so many of the worst")
    parser.add_argument("--models", nargs="*", default=[], choices=list(real_graphs.MODELS))
    parser.add_argument("--speeds", nargs="*", default=["balanced", "slow"], choices=list(real_graphs.SPEEDS))
    parser.add_argument("--recompute", action="store_true", help="what can be computed again in a model may be")
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS))
    parser.add_argument("--rows", type=int, default=80, help="memory rows of a model's program, at most")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of one program")
    parser.add_argument("--bounds", type=Path, metavar="FILE", help="read and add the bounds of layered steps here")
    args = parser.parse_args()
    announce(None, command=f"python benchmarks/optimality.py {' '.join(sys.argv[1:])}\n")
    compare_slow = functools.partial(compare_layered, time_limit=args.time_limit, bounds=args.bounds)
    for count, compared in ((args.instances, compare_small), (args.layered, compare_slow)):
        if count:
            pairs = zip(*itertools.product(range(args.seed, args.seed + count), args.budgets), strict=True)
            with ProcessPoolExecutor(args.jobs) as processes:
                print_random(list(processes.map(compared, *pairs)), args.worst)
    for name in args.models:
        if reason := real_graphs.missing(name):
            print(f"{name}: {reason}")
            continue
        made = [real_graphs.instance(name, speed, recompute=args.recompute) for speed in args.speeds]
        cases = itertools.product(made, args.budgets)
        print_real(compare(i, share, args.rows, args.time_limit, whole=args.recompute) for i, share in cases)


if __name__ == "__main__":
    main()
