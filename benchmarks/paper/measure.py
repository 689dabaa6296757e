"""Cases, each some ways to train that are compared in turns, and what is noted down of them.

A result is a dictionary of plain values, which goes to a JSON file:
    {"planned": [labels], "cases": {label: {"rounds": 15, "modes": {mode: figures}, "failed": {mode: why}}}}
A case that was planned and not measured is in "planned" alone; so is one that `Setup.done` names. Figures: lists have
one entry for every round; peaks are the highest of all rounds; other numbers are medians. The runner adds "run" to
every case: its command and machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

from families import Family
from training import Model, Step, Task
from workers import Ended, Workers

T = TypeVar("T")
Case = Mapping[str, Task]
Result = dict[str, Any]

LEAST = 5  # rounds of a case that has begun
CLAIM = 15  # rounds from which on a ratio is more than a hint
HIGHEST = ("peak_bytes", "resident_peak_bytes", "resident_before_bytes")
MEDIANS = ("written_bytes", "read_bytes", "forwarded_bytes", "saved_bytes", "stall_s", "stores", "loads")
EVERY = ("time_s", "graph_s", "cpu_s")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How to measure. `until`: the moment of time.monotonic() after which no case begins, and rounds beyond `LEAST` are
    not made. `shapes`: widths and layers. `head`: width of an attention head. `done`: labels of cases that an earlier
    run has measured. Models and sizes are those of the flags.
    """

    dir: str
    quick: bool
    rounds: int
    warmup: int
    until: float
    families: tuple[Family, ...]
    shapes: tuple[tuple[int, int], ...]
    head: int
    batch: int
    seq: int
    vocabulary: int
    amp: bool
    device: str
    jemalloc: str
    done: frozenset[str] = frozenset()

    def model(self, family: Family, width: int, layers: int, batch: int = 0) -> Model:
        shape = {"layers": layers, "width": width, "heads": max(width // self.head, 1), "seq": self.seq}
        rest = {"dropout": 0.1, "amp": self.amp, "seed": 0, "lr": 1e-3, "vocabulary": self.vocabulary}
        return Model(**shape, **rest, batch=batch or self.batch, family=family)  # type: ignore[arg-type] # by name

    def plain(self, model: Model, way: str = "inductor", **more: Any) -> Task:
        """A task without ssd_fx."""
        given = {"optimizer": "sgd", **more}
        return Task(model, way, device=self.device, directory=self.dir, **given)  # type: ignore[arg-type]

    def ours(self, model: Model, budget: object = 0, without: str = "", **options: Any) -> Task:
        small = {"min_bytes": 1024} if self.quick else {}
        given = {"dirs": [self.dir], "budget": budget, **small, **options}
        return replace(self.plain(model, "ssd_fx", without=without), options=given)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def due(self, cases: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        """The cases that are not done, in order, until the time is over."""
        for label, case in cases.items():
            if label not in self.done:
                if self.is_over:
                    return
                yield label, case


def measure_all(setup: Setup, cases: Mapping[str, Case]) -> Result:
    """The cases that are due."""
    found: Result = {"planned": list(cases), "cases": {}}
    for label, case in setup.due(cases):
        print(f"-- {label}", file=sys.stderr, flush=True)
        found["cases"][label] = measure(setup, case)
    return found


def measure(setup: Setup, case: Case) -> Result:
    """Rounds of one step of every task. A worker that ends is noted as failed, and the others go on."""
    failed, first, steps = {}, {}, []
    with Workers({}) as workers:
        for name, task in case.items():
            try:
                first[name] = workers.start(name, task)
            except Ended as ended:
                failed[name] = str(ended)
                del workers.workers[name]
        for number, taken in enumerate(workers.rounds(setup.warmup + setup.rounds if first else 0)):
            steps += [taken] if number >= setup.warmup else []
            if setup.is_over and len(steps) >= min(LEAST, setup.rounds):
                break
    modes = {name: figures([taken[name] for taken in steps], first[name], case[name]) for name in first}
    return {"rounds": len(steps), "modes": modes, "failed": failed}


def figures(steps: Sequence[Step], first_s: float, task: Task) -> Result:
    """What the page may want of one way to train."""
    found: Result = {"first_s": round(first_s, 2), "loss": steps[-1].loss}
    found |= {"tokens": task.model.batch * task.model.seq * task.micro, "micro": task.micro}
    found |= {name: [round(getattr(step, name), 5) for step in steps] for name in EVERY}
    found |= {name: max(getattr(step, name) for step in steps) for name in HIGHEST}
    return found | {name: median(getattr(step, name) for step in steps) for name in MEDIANS}
