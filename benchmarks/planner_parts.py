"""What each part of the planner's search is worth: predicted step times with and without it, on real graphs.

python benchmarks/planner_parts.py                      # GPT, BERT, T5, ViT of 2 layers and GPT of 12; two drives; six budgets
python benchmarks/planner_parts.py --models gpt --parts walks

Predicted times do not depend on what else the machine does; the seconds of planning do.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ssd_fx  # noqa: F401
from ssd_fx.passes.planner import host_tier, search, select, solve
from tests.passes import real_graphs
from tests.passes.instances import BUDGETS, Instance

HOSTED = ("host", "exchanges")


def nothing_refined(step: Any, machine: Any, start: Any, **more: Any) -> Any:
    return start


def singles_only(self: Any, wishes: Any) -> Iterator[Any]:
    return iter(())


def greedy(step: Any, machine: Any, choices: Any, play: Any) -> Any:
    """The first filling alone: the largest that fit."""
    best = play(host_tier.bound(step, choices))
    if not step.host_budget or best is None:
        return best
    found = play(next(iter(host_tier.fillings(step, choices, {}, machine))))
    return found if found is not None and host_tier.better(found.outcome, best.outcome) else best


PARTS: dict[str, list[tuple[Any, str, Any]]] = {
    "walks": [(solve, "WALKS", 0)],
    "kicks": [(solve, "WALKS", 0), (search, "KICKS", 0)],
    "pairs": [(search.Search, "_pairs", singles_only)],
    "descent": [(solve, "WALKS", 0), (search.Search, "improve", lambda self: None)],
    "refine": [(solve, "refine", nothing_refined), (solve, "WALKS", 0)],
    "pool": [(solve, "POOL", 1), (search, "POOL", 1), (solve, "WALKS", 0)],
    "all": [(solve, "refine", nothing_refined), (solve, "WALKS", 0), (search.Search, "improve", lambda self: None)],
    "exchanges": [(search.Search, "vary", lambda self: None), (solve, "WALKS", 0)],
    "lean": [
        *((solve, "WALKS", 0), (search, "KICKS", 0), (search.Search, "_pairs", singles_only)),
        *((solve, "refine", nothing_refined), (search.Search, "vary", lambda self: None)),
    ],
    "host": [(search.host_tier, "filled", greedy), (search.Search, "vary", lambda self: None), (solve, "WALKS", 0)],
}


@contextmanager
def without(part: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in PARTS.get(part, []):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def planned(case: Instance, budget: float | str, host: int) -> tuple[float, float]:
    """Predicted seconds, and seconds of planning."""
    step = replace(case.step, host_budget=host) if host else case.step
    started = time.process_time()
    found, _ = select.solve_for(step, budget, case.machine, 64 << 20)
    return found.outcome.seconds, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*real_graphs.MODELS])
    parser.add_argument("--parts", nargs="+", default=[*PARTS])
    parser.add_argument("--speeds", nargs="+", default=["balanced", "slow"])
    parser.add_argument("--json")
    flags = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in flags.models:
        for speed in flags.speeds:
            case = real_graphs.instance(name, speed, recompute=True)
            total = sum(item.nbytes for item in case.step.items)
            for budget in BUDGETS:
                for part in flags.parts:
                    host = total // 3 if part in HOSTED else 0
                    with without("walks" if part in HOSTED else "-"):
                        best, spent = planned(case, budget, host)
                    with without(part):
                        less, short = planned(case, budget, host)
                    rows.append(
                        {
                            "model": name,
                            "speed": speed,
                            "budget": budget,
                            "part": part,
                            "worse": less / best - 1,
                            "planning_s": spent,
                            "planning_without_s": short,
                        }
                    )
                print(
                    json.dumps(
                        [
                            (
                                r["part"],
                                round(100 * r["worse"], 2),
                                round(r["planning_s"], 1),
                                round(r["planning_without_s"], 1),
                            )
                            for r in rows[-len(flags.parts) :]
                        ]
                    ),
                    name,
                    speed,
                    budget,
                    flush=True,
                )
    for part in flags.parts:
        worse = sorted(row["worse"] for row in rows if row["part"] == part)
        saved = math.fsum(r["planning_s"] - r["planning_without_s"] for r in rows if r["part"] == part)
        print(
            f"without {part:8}: median {100 * statistics.median(worse):+.2f}%, worst {100 * worse[-1]:+.2f}%, "
            f"mean {100 * statistics.fmean(worse):+.2f}%, planning {saved:+.1f} s less"
        )
    if flags.json:
        Path(flags.json).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
