"""Compare the training step of a small GPT under plain Inductor and under ssd_fx, step by step, in pairs.

python benchmarks/gpt_step.py --dir /mnt/nvme                       # the example's model
python benchmarks/gpt_step.py --dir /mnt/nvme --pairs 20 --neighbour   # beside a process that keeps one core busy

How it is measured: in pairs of steps of two worker processes, as workers.py and training.py say.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict

from system import MIB, announce, write_json  # neighbours of this file
from training import Model, Step, Task, train_gpt
from workers import Workers, busy_neighbour

BACKENDS = ("inductor", "ssd_fx")


def measure(flags: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, Step]]]:
    """Seconds of the first (compiling) step per backend, and the pairs."""
    given = {"budget": flags.budget, "dirs": flags.dir and [flags.dir]}
    options = {name: value for name, value in given.items() if value}
    model = Model.of(flags)
    with Workers({"inductor": Task(model, "inductor"), "ssd_fx": Task(model, "ssd_fx", options=options)}) as workers:
        first = workers.compile()
        with busy_neighbour() if flags.neighbour else nullcontext():
            pairs = []
            for pair in workers.rounds(flags.warmup + flags.pairs):
                pairs.append(pair)
                times = ", ".join(f"{name} {1e3 * step.time_s:.0f} ms" for name, step in pair.items())
                print(f"pair {len(pairs)} of {flags.warmup + flags.pairs}: {times}", file=sys.stderr, flush=True)
        return first, pairs[flags.warmup :]


def median(steps: Iterable[Step], field: str) -> float:
    return float(statistics.median(getattr(step, field) for step in steps))


def table(pairs: list[dict[str, Step]]) -> list[tuple[str, str, str]]:
    """Rows of (what, inductor, ssd_fx); medians over the steps, except that peaks are the highest."""
    plain, offload = ([pair[backend] for pair in pairs] for backend in BACKENDS)

    def row(name: str, field: str, unit: str, scale: float = 1.0, both: bool = True) -> tuple[str, str, str]:
        left = f"{median(plain, field) * scale:.1f}" if both else "-"
        return f"{name}, {unit}", left, f"{median(offload, field) * scale:.1f}"

    def highest(name: str, field: str) -> tuple[str, str, str]:
        left, right = (max(getattr(s, field) for s in steps) / MIB for steps in (plain, offload))
        return f"{name}, MiB", f"{left:.1f}", f"{right:.1f}"

    saved = median(offload, "saved_bytes")
    share = f"{100 * median(offload, 'offloaded_bytes') / saved:.0f}%" if saved else "-"
    ratios = [pair["ssd_fx"].time_s / pair["inductor"].time_s for pair in pairs]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    difference = max(abs(pair["ssd_fx"].loss - pair["inductor"].loss) for pair in pairs)
    io = [step.io_cpu_s for step in offload if step.io_cpu_s is not None]
    return [
        row("step time", "time_s", "ms", 1e3),
        ("  ratio of pairs: median (min to max)", "1", spread),
        row("CPU time", "cpu_s", "ms", 1e3),
        ("  of it I/O threads (10 ms ticks), ms", "-", f"{statistics.median(io) * 1e3:.1f}" if io else "unknown"),
        row("stall: the step waited for the disk", "stall_s", "ms", 1e3, both=False),
        highest("peak live tensors above the level before", "peak_bytes"),
        highest("most memory of the process", "resident_peak_bytes"),
        row("saved activations", "saved_bytes", "MiB", 1 / MIB, both=False),
        ("  offloaded", "-", share),
        row("written per step", "written_bytes", "MiB", 1 / MIB, both=False),
        row("read per step", "read_bytes", "MiB", 1 / MIB, both=False),
        row("forwarded per step (not read back)", "forwarded_bytes", "MiB", 1 / MIB, both=False),
        row("on disk", "disk_bytes", "MiB", 1 / MIB, both=False),
        ("last loss", f"{plain[-1].loss:.6f}", f"{offload[-1].loss:.6f}"),
        ("  losses of all pairs", "", f"differ by at most {difference:.1e}" if difference else "equal"),
    ]


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_gpt.add_budget_flag(parser)
    train_gpt.add_model_flags(parser)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of steps, default %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="pairs before them, default %(default)s")
    parser.add_argument("--neighbour", action="store_true", help="keep one core busy with another process")
    return parser.parse_args(arguments)


def main() -> None:
    flags = parse_flags(sys.argv[1:])
    budget, neighbour = flags.budget or "the backend's default", "one busy process" if flags.neighbour else "none"
    where = announce(flags.dir, model=str(Model.of(flags)), budget=budget, neighbour=neighbour)
    first, pairs = measure(flags)
    rows = table(pairs)
    print(f"\nmedians of {len(pairs)} pairs; peaks are the highest of all steps\n{'':44}{'inductor':>12}  ssd_fx")
    for name, left, right in rows:
        print(f"{name:44}{left:>12}  {right}")
    if flags.json:
        steps = [{backend: asdict(step) for backend, step in pair.items()} for pair in pairs]
        result = {"system": where, "flags": vars(flags), "first_step_s": first, "table": rows, "pairs": steps}
        write_json(flags.json, result)


if __name__ == "__main__":
    main()
