"""A drive that gets slower while a model trains, and fast again: how long steps wait, and what rests in memory.

    python benchmarks/slow_drive.py --dir DIR [--plot FILE.svg]

The drive is that of DIR, held to `--rate`, each way on its own. From step `--slow-from` to `--fast-from` it has a
quarter of that. The budget is "auto", planned for a much faster drive, so 95% go to the drive. What else rests is what
the runtime decides while it runs. The plot has the share of a step that waits, what may rest of the bytes
offloaded, and the peak of live tensors to the highest one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import held  # neighbours of this file
import peak
import svg
from training import Model, Task, train

from ssd_fx.runtime.stores import stores

MIB = 1 << 20


@dataclass(frozen=True)
class Seen:
    """One step: its seconds, those that it waited, the bytes offloaded, and how many of them may rest in memory."""

    step: int
    seconds: float
    waited_s: float
    offloaded_bytes: int
    room_bytes: int
    peak_bytes: int

    @property
    def waited(self) -> float:
        return 100 * self.waited_s / self.seconds

    @property
    def rests(self) -> float:
        return 100 * min(1.0, self.room_bytes / max(self.offloaded_bytes, 1))


def steps(flags: argparse.Namespace) -> Iterator[Seen]:
    hold = held.register(flags.rate)
    options = {"engine": held.NAME, "dirs": [flags.dir], "budget": "auto", "min_bytes": 65536}
    rates = {"write_bw": 1e12, "read_bw": 1e12}
    task = Task(Model.of(flags), "ssd_fx", options=options | {"machine": rates})
    for number, step in enumerate(islice(train(task), flags.steps)):
        (store,) = stores.values()
        waited = step.write_stall_s + step.read_stall_s
        yield Seen(number, step.graph_s, waited, step.offloaded_bytes, store.residency.nbytes, step.peak_bytes)
        slow = flags.slow_from <= number + 1 < flags.fast_from
        hold(flags.rate / (4 if slow else 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the drive")
    parser.add_argument("--rate", type=float, default=1.0, help="GB/s of the drive, each way (%(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--slow-from", type=int, default=20)
    parser.add_argument("--fast-from", type=int, default=60)
    parser.add_argument("--plot", help="where the picture goes, an SVG file")
    for name, default in (("layers", 6), ("width", 256), ("heads", 4), ("batch", 8), ("seq", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.set_defaults(dropout=0.0, amp=False, lr=3e-4)
    flags = parser.parse_args()
    if not peak.is_preloaded():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | peak.environment())
    print(f"{'step':>5}{'s':>8}{'waited':>9}{'may rest, MiB':>15}{'of MiB':>9}{'peak, MiB':>11}")
    seen = []
    for one in steps(flags):
        seen.append(one)
        rests = f"{one.room_bytes / MIB:15.1f}{one.offloaded_bytes / MIB:9.1f}{one.peak_bytes / MIB:11.1f}"
        print(f"{one.step:5}{one.seconds:8.3f}{one.waited:8.1f}%{rests}", flush=True)
    if flags.plot:
        Path(flags.plot).write_text(picture(seen[2:], flags))


def picture(seen: list[Seen], flags: argparse.Namespace) -> str:
    def line(value: Callable[[Seen], float]) -> list[svg.Point]:
        return [svg.Point(one.step, value(one), value(one), value(one)) for one in seen]

    highest = max(one.peak_bytes for one in seen)
    return svg.plot(
        {
            "waiting, %": line(lambda one: one.waited),
            "may rest, %": line(lambda one: one.rests),
            "peak, %": line(lambda one: 100 * one.peak_bytes / highest),
        },
        title=f"A drive of {flags.rate:g} GB/s, a quarter of it from step {flags.slow_from} to {flags.fast_from}",
        x="step",
        y="%",
    )


if __name__ == "__main__":
    main()
