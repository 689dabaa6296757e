"""Long rows on one GPU: layers of Llama 3's 8B, one row of 8 to 128 thousand tokens, beside checkpoints.

python benchmarks/long_context.py                             # predicted for an H100 and an H200 (half an hour)
python benchmarks/long_context.py --layers 4 --tokens 8192 65536 --gpus h200
python benchmarks/long_context.py --measure --dir /mnt/nvme   # trained here, on the CPU, at a small width (15 minutes)

Predicted: nothing runs. The model is `families.Long` in bfloat16, whose loss is in pieces. Peaks are of a step, above
its weights and what their optimizer keeps, with the gradients that it makes. An H200's rates are those that
`ssd-fx calibrate` found on one (docs/results/gpu); an H100 has the same chip, with 3.35 TB/s of memory for 4.8. What
leaves goes to pinned host memory at some 50 GB/s, or to drives of so many GB/s each way.

Measured: the same model, narrow, in float32, its drive that of DIR. A process for each way, in rounds of one step of
each (workers.py). One way has as much `memory` as the checkpoint's step takes, with weights, gradients and what AdamW
keeps. On a GPU `make gpu-long` trains it at full width.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import h200  # neighbours of this file
from families import WORDS
from forecasts import Budget, Figure, limit, of_rival, ours
from h200 import GIB
from rivals import KEEP, Rival, Sizes, made, per_layer
from slow_step import call_of
from system import MIB, announce, write_json
from training import Model, Step, Task
from workers import Workers, ratios

from ssd_fx.rivals import CHECKPOINT

WIDTH, HEADS = 4096, 32  # of Llama 3's 8B
MEMORY_BW = {"h100": 3.35 / 4.8, "h200": 1.0}  # to that of an H200
HOST = "host memory"
TOKENS = (8192, 16_384, 32_768, 65_536, 131_072)
NARROW = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 4096}
HERE = (2048, 4096, 8192)
INDUCTOR, DEFAULT, LOWEST = "inductor", 'ssd_fx, "auto"', "ssd_fx, budget 0"
LIMITED = "ssd_fx, memory of the checkpoint"


@dataclass(frozen=True)
class Row:
    """A way to train one row of tokens. `figure`: None where no plan is found."""

    tokens: int
    gpu: str
    way: str
    figure: Figure | None


def rates(gpu: str, drive_gbps: float) -> dict[str, Any]:
    """The option `machine`. `drive_gbps`: of drives each way, 0 for host memory instead of them."""
    found: dict[str, Any] = h200.plans.rates(h200.MACHINE)
    found["memory_bw"] *= MEMORY_BW[gpu]
    if drive_gbps:
        found |= {"write_bw": drive_gbps * 1e9, "read_bw": drive_gbps * 1e9, "latency_s": 1e-4}
    return found


def predicted(gpu: str, tokens: int, layers: int, drives: Sequence[float]) -> Iterator[Row]:
    """Everything kept, a checkpoint per layer, and ours: at the latter's peak, and at the lowest."""
    sizes = Sizes("long", layers, WIDTH, HEADS, 1, tokens, WORDS)
    yield Row(tokens, gpu, KEEP, of_rival(made(sizes), Rival(KEEP), rates(gpu, 0)))
    checkpoint = of_rival(made(sizes), Rival(CHECKPOINT, per_layer), rates(gpu, 0))
    yield Row(tokens, gpu, CHECKPOINT, checkpoint)
    for gbps in (0.0, *drives):
        where = f"{gbps:g} GB/s" if gbps else HOST
        asked: dict[str, Budget] = {"at the checkpoint's peak": limit(checkpoint.peak_bytes), "budget 0": 0.0}
        found = ours(made(sizes), list(asked.values()), rates(gpu, gbps))
        for name, planned in zip(asked, found, strict=True):
            yield Row(tokens, gpu, f"ssd_fx, {where}, {name}", planned)


def forecast(flags: argparse.Namespace) -> str:
    """Markdown; a row of the table as soon as it is known."""
    head = "| tokens | GPU | way | peak, GiB | step, ms | to everything kept | written, GiB |"
    lines = [f"{flags.layers} layers", "", head, "|---|" + "---|" * 6]
    print(*lines, sep="\n", flush=True)
    for tokens in flags.tokens:
        for gpu in flags.gpus:
            keep = None
            for row in predicted(gpu, tokens, flags.layers, flags.gbps):
                keep = keep or row.figure
                lines.append(f"| {' | '.join(_cells(row, keep))} |")
                print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def _cells(row: Row, keep: Figure | None) -> Iterator[str]:
    yield from (f"{row.tokens:,}", row.gpu, row.way)
    if row.figure is None or keep is None:
        yield from ("no plan", "", "", "")
        return
    yield f"{row.figure.peak_bytes / GIB:.2f}"
    yield f"{1e3 * row.figure.step_s:.0f}"
    yield f"{row.figure.step_s / keep.step_s:.3f}"
    yield f"{row.figure.written_bytes / GIB:.2f}"


def measured(flags: argparse.Namespace) -> str:
    """Markdown: five ways in turns for each length of a row."""
    where = announce(flags.dir)
    head = "| tokens | way | s | to Inductor (quartiles) | CPU time | live peak, MiB | written, MiB |"
    lines, cases = [head, "|---|" + "---|" * 6], []
    for tokens in flags.tokens:
        model = Model(**NARROW, batch=1, seq=tokens, dropout=0.0, amp=False, seed=0, lr=3e-4, family="long")
        with Workers(_tasks(model, flags.dir)) as workers:
            workers.compile()
            peak_bytes = max(steps[CHECKPOINT].peak_bytes for steps in workers.rounds(flags.warmup))
            limit_bytes = kept_bytes(model) + peak_bytes
            workers.start(LIMITED, _ours(model, flags.dir, memory=limit_bytes))
            rounds = list(workers.rounds(flags.warmup + flags.rounds))[flags.warmup :]
        cases.append({"model": asdict(model), "rounds": [{n: asdict(s) for n, s in r.items()} for r in rounds]})
        lines += [f"| {tokens:,} | {_measured_cells(name, rounds)} |" for name in rounds[0]]
    write_json(flags.out.with_suffix(".json"), {"system": where, "cases": cases})
    return "\n".join(lines) + "\n"


def _tasks(model: Model, directory: str) -> dict[str, Task]:
    return {
        INDUCTOR: Task(model, "inductor"),
        CHECKPOINT: Task(model, "checkpoint"),
        DEFAULT: _ours(model, directory),
        LOWEST: _ours(model, directory, budget=0),
    }


def _ours(model: Model, directory: str, **more: object) -> Task:
    return Task(model, "ssd_fx", options={"dirs": [directory], "min_bytes": 65_536} | more)


def kept_bytes(model: Model) -> int:
    """What training keeps between steps: weights, their gradients, and two tensors of AdamW for each."""
    return 4 * sum(each.nbytes for each in call_of(model)[0].parameters())


def _measured_cells(name: str, rounds: Sequence[Mapping[str, Step]]) -> str:
    steps, reference = [each[name] for each in rounds], [each[INDUCTOR] for each in rounds]
    cells = [name, f"{median(s.time_s for s in steps):.3f}", *ratios(steps, reference)]
    cells += [f"{max(s.peak_bytes for s in steps) / MIB:.1f}"]
    cells += [f"{median(s.written_bytes for s in steps) / MIB:.1f}"]
    return " | ".join(cells)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=8, help="of the predicted model, default %(default)s")
    add("--tokens", type=int, nargs="+", default=None, help=f"default {TOKENS}, with --measure {HERE}")
    add("--gpus", nargs="+", choices=list(MEMORY_BW), default=list(MEMORY_BW))
    add("--gbps", nargs="+", type=float, default=[24.0], help="of drives each way, default %(default)s")
    add("--measure", action="store_true", help="train here instead")
    add("--dir", default="", help="with --measure: a directory on the drive")
    add("--rounds", type=int, default=15, help="measured rounds of one step of every way, default %(default)s")
    add("--warmup", type=int, default=3, help="rounds before them, default %(default)s")
    add("--out", type=Path, default=Path("demo-out/long-context.md"), help="the table's file, default %(default)s")
    flags = parser.parse_args(arguments)
    if flags.measure and not flags.dir:
        parser.error("--measure needs --dir, a directory on the drive")
    flags.tokens = flags.tokens or (HERE if flags.measure else TOKENS)
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parsed(arguments)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    if flags.measure:
        text = measured(flags)
        print(text, end="")
    else:
        text = forecast(flags)
    flags.out.write_text(text)


if __name__ == "__main__":
    main()
