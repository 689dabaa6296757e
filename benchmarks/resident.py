"""The memory of the process and the step time: plain Inductor, a checkpoint per block, ssd_fx, and other mallocs.

python benchmarks/resident.py --dir /mnt/nvme --rounds 15
python benchmarks/resident.py --dir /mnt/nvme --rounds 4 --processes 6   # equal processes differ by some percent
python benchmarks/resident.py --dir /mnt/nvme --ways inductor 0.05 checksums=false budget=0,cpu_allocator=false
python benchmarks/resident.py --dir /mnt/nvme --ways inductor budget0 inductor+jemalloc --jemalloc LIB.so
python benchmarks/resident.py --dir /mnt/nvme --layers 24 --ways blocks_checkpoint ssd_fx_checkpoint   # of every block

How it is measured: a process for each way, in rounds of one step of each (workers.py). Resident memory is the highest
of all rounds (VmHWM, reset before every step); live memory that of the tensors (training.py). Times are compared within
a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from families import FAMILIES
from system import MIB, announce, write_json
from training import Model, Step, Task, train_gpt
from workers import Workers, ratios

WAYS = ("inductor", "checkpoint", "default", "budget0")


def task(model: Model, name: str, flags: argparse.Namespace) -> Task:
    way, _, malloc = name.partition("+")
    preload = str(getattr(flags, malloc)) if malloc else ""
    if way == "inductor":
        return Task(model, "inductor", preload=preload)
    if way in ("checkpoint", "blocks_checkpoint"):
        return Task(model, "checkpoint" if way == "checkpoint" else "blocks_checkpoint", preload=preload)
    where = {"dirs": [flags.dir]} if flags.dir else {}
    if way == "ssd_fx_checkpoint":
        return Task(model, "ssd_fx_checkpoint", options=where | {"min_bytes": 65_536}, preload=preload)
    return Task(model, "ssd_fx", options=where | options_of(way), preload=preload)


def options_of(way: str) -> dict[str, Any]:
    """Of ssd_fx: none by "default", else a budget, or options with values in JSON."""
    if way == "default":
        return {}
    if "=" in way:
        pairs = (option.partition("=") for option in way.split(","))
        return {name: json.loads(value) for name, _, value in pairs}
    return {"budget": 0 if way == "budget0" else way}


def row(name: str, steps: Sequence[Step], reference: Sequence[Step]) -> str:
    before = steps[0].resident_before_bytes
    resident, live = max(s.resident_peak_bytes for s in steps), max(s.peak_bytes for s in steps)
    seconds = f"{median(s.time_s for s in steps):.3f}"
    ratio = resident / (before + live)
    cells = (name, seconds, *ratios(steps, reference), live / MIB, before / MIB, resident / MIB, f"{ratio:.2f}")
    return "| " + " | ".join(c if isinstance(c, str) else f"{c:.0f}" for c in cells) + " |"


def table(rounds: Sequence[Mapping[str, Step]]) -> str:
    head = "| | s | to the first (quartiles) | CPU time | live peak, MiB | resident before, MiB | resident peak, MiB "
    head += "| resident peak to before + live |"
    names = list(rounds[0])
    lines = [row(name, [r[name] for r in rounds], [r[names[0]] for r in rounds]) for name in names]
    return "\n".join([head, "|---|" + "---|" * 7, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    train_gpt.add_model_flags(parser)
    parser.set_defaults(layers=12, seq=512, lr=3e-4)
    parser.add_argument("--family", choices=FAMILIES, default="gpt")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="also a budget, OPTION=VALUE[,...], WAY+jemalloc")
    parser.add_argument("--jemalloc", type=Path, help="the library for WAY+jemalloc")
    parser.add_argument("--mimalloc", type=Path, help="the library for WAY+mimalloc")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1, help="start them so often, for all rounds each time")
    flags = parser.parse_args()
    model = Model.of(flags)
    announce(flags.dir, model=f"{model}\n")
    rounds = []
    for _ in range(flags.processes):
        with Workers({name: task(model, name, flags) for name in flags.ways}) as workers:
            workers.compile()
            rounds += list(workers.rounds(flags.warmup + flags.rounds))[flags.warmup :]
    print(table(rounds))
    if flags.json:
        write_json(flags.json, [{n: asdict(s) for n, s in r.items()} for r in rounds])
    return 0


if __name__ == "__main__":
    sys.exit(main())
