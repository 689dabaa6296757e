"""What the planner predicts for a training step, beside what the step takes: compute, stall, time and peak.

python benchmarks/predicted.py --dir /mnt/nvme                              # the demo model and a 12-layer one
python benchmarks/predicted.py --dir /mnt/nvme --models demo --budgets 0.5 0

How it is measured:
- One process of plain Inductor and one of ssd_fx for every budget take turns (workers.py). Predictions are those that
  ssd_fx dumps beside its plan: `<graph>.plan.json`, the key "predicted".
- Predicted times are those of calibration, which the machine had for some tenths of a second at some other time.
- Times are of forward and backward, without the optimizer, as the plan has no optimizer: medians over the rounds.
  Compute is plain Inductor's; what ssd_fx adds besides waiting is in its step time.
- The stall is what the runtime counts: waits for loads, and waits in stores and releases.
- The peak is the highest of all steps, live tensors above the level before the step and load buffers together:
  activations, what is alive for a moment only, and the gradients that the backward makes, as in the plan.
- Of what is computed again compute has none.
- The error is (predicted - measured) / measured. The floor is what the plan says no offload can remove.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from system import MIB, announce, write_json
from training import Model, Step, Task, train_gpt
from workers import Workers

SHAPES = {
    "demo": {"layers": 4, "width": 256, "heads": 4, "seq": 256},
    "12 layers": {"layers": 12, "width": 384, "heads": 6, "seq": 512},
}
BUDGETS = (1.0, 0.5, 0.0)
TOLERANCE = 0.15  # of a relative error
RESOLUTION = 0.01  # a time that differs by less than this share of the step is no error that matters
FLOOR_TOLERANCE = 0.10  # of the peak at budget 0, above the floor


@dataclass(frozen=True)
class Predicted:
    """What a plan says of one step of its graph: seconds and bytes."""

    step_s: float
    compute_s: float
    write_stall_s: float
    read_stall_s: float
    peak_bytes: int
    floor_bytes: int
    kept_peak_bytes: int
    limit_bytes: int
    recomputed: int = 0  # tensors that another partition than PyTorch's computes again

    @property
    def stall_s(self) -> float:
        return self.write_stall_s + self.read_stall_s


@dataclass(frozen=True)
class Row:
    """One figure; seconds, or bytes where `is_memory`."""

    name: str
    predicted: float
    measured: float
    step_s: float
    is_memory: bool = False

    @property
    def error(self) -> float:
        """Relative to the measured figure; infinite where that is 0 and the predicted one is not."""
        difference = self.predicted - self.measured
        if not difference:
            return 0.0
        return difference / self.measured if self.measured else float("inf")

    @property
    def flag(self) -> str:
        """Empty if the error is tolerable."""
        if abs(self.error) <= TOLERANCE:
            return ""
        small = not self.is_memory and abs(self.predicted - self.measured) < RESOLUTION * self.step_s
        return f"beyond {TOLERANCE:.0%}" + (f", but under {RESOLUTION:.0%} of the step" if small else "")


def read(directory: Path) -> Predicted:
    """The predictions of the one graph that was dumped into `directory`.

    Raises:
        ValueError: not one graph; figures of a step cannot be told from several.
    """
    files = sorted(directory.glob("*.plan.json"))
    if len(files) != 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{directory} holds the plans of {len(files)} graphs, {names}, and a step should be one graph")
    plan = json.loads(files[0].read_text())
    figures = plan["predicted"] | {"recomputed": len(plan["recomputed"])}
    return Predicted(**{name: figures[name] for name in Predicted.__dataclass_fields__})


def rows(plan: Predicted, keep: Sequence[Step], ours: Sequence[Step]) -> list[Row]:
    """All figures of one budget; `keep` are the steps of plain Inductor in the same rounds."""
    step_s = middle(ours, lambda s: s.graph_s)
    figures = [
        Row("compute", plan.compute_s, middle(keep, lambda s: s.graph_s), step_s),
        Row("stall of writes", plan.write_stall_s, middle(ours, lambda s: s.write_stall_s), step_s),
        Row("stall of reads", plan.read_stall_s, middle(ours, lambda s: s.read_stall_s), step_s),
        Row("stall", plan.stall_s, middle(ours, lambda s: s.stall_s), step_s),
        Row("forward and backward", plan.step_s, step_s, step_s),
        Row("peak", plan.peak_bytes, highest(ours), step_s, True),
    ]
    if not plan.recomputed:  # what keeps all is that partition, not plain Inductor's
        figures.append(Row("peak with all kept", plan.kept_peak_bytes, highest(keep), step_s, True))
    return figures


def middle(steps: Sequence[Step], figure: Callable[[Step], float]) -> float:
    return statistics.median(map(figure, steps))


def highest(steps: Sequence[Step]) -> int:
    return max(step.peak_bytes for step in steps)


def table(found: Sequence[Row]) -> str:
    head = f"{'':24}{'predicted':>12}{'measured':>12}{'error':>9}"
    return "\n".join([head, *(_line(row) for row in found)])


def _line(row: Row) -> str:
    unit, scale = ("MiB", 1 / MIB) if row.is_memory else ("ms", 1e3)
    figures = f"{row.predicted * scale:>12.1f}{row.measured * scale:>12.1f}{row.error:>+9.1%}"
    return f"{f'{row.name}, {unit}':24}{figures}  {row.flag}".rstrip()


def floor_line(plan: Predicted, peak_bytes: int) -> str:
    """The measured peak beside the predicted floor."""
    above = peak_bytes / plan.floor_bytes - 1 if plan.floor_bytes else float("inf")
    floor, limit = plan.floor_bytes / MIB, plan.limit_bytes / MIB
    text = f"floor {floor:.1f} MiB, limit {limit:.1f} MiB; the measured peak is {above:+.1%} from the floor"
    at_floor = plan.limit_bytes <= (1 + FLOOR_TOLERANCE) * plan.floor_bytes
    if at_floor and above > FLOOR_TOLERANCE:
        text += f", beyond {FLOOR_TOLERANCE:.0%}"
    return text + (f"; {plan.recomputed} tensors are computed again" if plan.recomputed else "")


def measure(
    model: Model, flags: argparse.Namespace, scratch: Path
) -> tuple[list[dict[str, Step]], dict[str, Predicted]]:
    """The rounds, and for every budget its prediction."""

    def task(budget: float, name: str) -> Task:
        where = {"dirs": [flags.dir]} if flags.dir else {}
        return Task(model, "ssd_fx", options={"budget": budget, "dump": str(scratch / name)} | where)

    ours = {f"budget {budget:g}": task(budget, f"budget {budget:g}") for budget in flags.budgets}
    with Workers({"keep": Task(model, "inductor")} | ours) as workers:
        workers.compile()
        list(workers.rounds(flags.warmup))
        plans = {name: read(scratch / name) for name in ours}
        return list(workers.rounds(flags.rounds)), plans


def report(rounds: Sequence[Mapping[str, Step]], plans: Mapping[str, Predicted]) -> dict[str, list[Row]]:
    """Prints a table for every budget, and returns their rows."""
    found = {}
    for name, plan in plans.items():
        ours = [steps[name] for steps in rounds]
        found[name] = rows(plan, [steps["keep"] for steps in rounds], ours)
        print(f"\n{name}, {len(rounds)} rounds\n{table(found[name])}")
        print(floor_line(plan, highest(ours)))
    return found


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_gpt.add_model_flags(parser)
    add = parser.add_argument
    add("--models", nargs="+", choices=[*SHAPES, "flags"], default=list(SHAPES), help="flags: as the flags say")
    add("--budgets", nargs="+", type=float, default=BUDGETS, help="shares from 1 to 0, default %(default)s")
    add("--rounds", type=int, default=9, help="measured rounds, default %(default)s")
    add("--warmup", type=int, default=5, help="rounds before the measured ones, default %(default)s")
    return parser.parse_args(arguments)


def main() -> None:
    flags = parse_flags(sys.argv[1:])
    where = announce(flags.dir)
    result: dict[str, Any] = {"system": where, "flags": vars(flags), "models": {}}
    for name in flags.models:
        model = Model.of(argparse.Namespace(**(vars(flags) | SHAPES.get(name, {}))))
        print(f"\n{name}: {model}", flush=True)
        with tempfile.TemporaryDirectory(prefix="ssd_fx-predicted-") as scratch:
            rounds, plans = measure(model, flags, Path(scratch))
        found = report(rounds, plans)
        tables = {budget: [asdict(row) | {"error": row.error} for row in each] for budget, each in found.items()}
        steps = [{budget: asdict(step) for budget, step in each.items()} for each in rounds]
        said = {budget: asdict(plan) for budget, plan in plans.items()}
        result["models"][name] = {"model": asdict(model), "rows": tables, "plans": said, "rounds": steps}
    if flags.json:
        write_json(flags.json, result)


if __name__ == "__main__":
    main()
