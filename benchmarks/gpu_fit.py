"""On a GPU: whether training stays within the option `memory`, how much of it is used, and what a tight limit costs.

python benchmarks/gpu_fit.py --dir /mnt/nvme --layers 6 --width 4096 --heads 32 --batch 16 --optimizer sgd --bfloat16 \\
    --limits 10GiB 12GiB 15GiB
python benchmarks/gpu_fit.py --print FILE.json ...   # the tables of what was measured before

A process for each limit, since the limit is one of a process. They compile at once, and the last steps of each are
timed alone. What torch's allocator counts as allocated is what `memory` limits. What it has reserved stands beside it,
without the device's context. Host memory takes what leaves. fit_memory.py does the same on the CPU, where more can be
tried: blocks, micro-batches, batches that change.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_machine import results_path, system  # neighbours of this file
from gpu_steps import Training, no_events
from gpu_ways import add_model_flags, model_of
from system import MIB, write_json
from turns import Turn

import ssd_fx
from ssd_fx.sizes import parse_bytes

PLAIN = "no limit"  # plain Inductor


@dataclass(frozen=True)
class Step:
    """Bytes at the peak of a whole step, of all tensors and of what the allocator has reserved; seconds."""

    peak_bytes: int
    reserved_bytes: int
    time_s: float
    loss: float
    written_bytes: int


def steps(flags: argparse.Namespace, limit: str) -> Iterator[Step]:
    """Endless steps of one process."""
    no_events()
    training = Training(flags)
    training.ours = limit != PLAIN
    options = {"dirs": [flags.dir], "allow_tmpfs": flags.allow_tmpfs, "engine": "memory", "memory": limit}
    how: dict[str, Any] = {"backend": ssd_fx.backend, "options": options} if training.ours else {}
    training.compiled = torch.compile(training.model, **how)
    while True:
        seen = training.step()
        cuda = training.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        reserved = torch.cuda.max_memory_reserved() if cuda else 0
        yield Step(peak, reserved, seen.time_s, seen.loss, seen.written_bytes)


def work(flags: argparse.Namespace, limit: str) -> None:
    """Prints every step as a line of JSON, the last ones of them alone."""
    turn = Turn(flags.turns) if flags.turns else None
    if turn and not turn.compile(flags.patience):
        return
    for number, step in enumerate(steps(flags, limit)):
        print(json.dumps(asdict(step)), flush=True)
        if number + 1 == flags.steps:
            return
        if turn and number + 1 == flags.steps - flags.last and not turn.measure(flags.patience):
            return


def measure(flags: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The steps of every limit, and of plain Inductor."""
    command = [sys.executable, __file__, *sys.argv[1:], "--work"]
    workers = {
        limit: subprocess.Popen([*command, limit], stdout=subprocess.PIPE, text=True)
        for limit in (*flags.limits, PLAIN)
    }
    found = {limit: worker.communicate()[0].splitlines() for limit, worker in workers.items()}
    return {limit: [json.loads(line) for line in lines if line.startswith("{")] for limit, lines in found.items()}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: the highest peaks of all steps, and the time and the use of the last ones."""
    lines = [f"# {result['system']['device']}, {result['date']}", "", "Written by benchmarks/gpu_fit.py.", ""]
    lines += [f"- {name}: {text}" for name, text in result["system"].items()]
    head = "| limit | steps | highest peak, MiB | within it | reserved, MiB | used at last | copied, MiB | step, ms |"
    lines += ["", head, "|---|" + "---|" * 7]
    last = result["flags"]["last"]
    lines += [row(limit, made, last) for limit, made in result["limits"].items() if made]
    lines += [f"| {limit} | none |" for limit, made in result["limits"].items() if not made]
    return "\n".join(lines) + "\n"


def row(limit: str, made: Sequence[Mapping[str, Any]], last: int) -> str:
    nbytes = 0 if limit == PLAIN else parse_bytes("--limits", limit)
    peak, reserved = (max(step[f"{what}_bytes"] for step in made) for what in ("peak", "reserved"))
    held = "" if not nbytes else "yes" if peak <= nbytes else f"NO, {(peak - nbytes) / MIB:.0f} MiB over"
    used = f"{max(step['peak_bytes'] for step in made[-last:]) / nbytes:.1%}" if nbytes else ""
    seconds, written = (statistics.median(step[name] for step in made[-last:]) for name in ("time_s", "written_bytes"))
    cells = [limit, f"{len(made)}", f"{peak / MIB:.0f}", held, f"{reserved / MIB:.0f}", used]
    return f"| {' | '.join([*cells, f'{written / MIB:.0f}', f'{seconds * 1e3:.1f}'])} |"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--limits", nargs="+", default=["2GiB"], metavar="SIZE", help="of all tensors on the GPU")
    add("--steps", type=int, default=24, help="of every process, default %(default)s")
    add("--last", type=int, default=8, help="of these, timed alone, default %(default)s")
    add("--work", metavar="SIZE", help=argparse.SUPPRESS)
    return add_model_flags(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a process ended before its last step."""
    flags = parsed(arguments)
    if flags.print:
        print(*(table(json.loads(Path(path).read_text())) for path in flags.print), sep="\n", end="")
        return 0
    if flags.work:
        work(flags, flags.work)
        return 0
    date, about = datetime.date.today().isoformat(), system(flags) | {"model": model_of(flags)}
    path = results_path(flags, date, about["device"], flags.name or "fit")
    limits = measure(flags)
    result = {"date": date, "system": about, "flags": vars(flags), "limits": limits}
    write_json(f"{path}.json", result)
    print(table(result), end="")
    return int(any(len(made) < flags.steps for made in limits.values()))


if __name__ == "__main__":
    sys.exit(main())
