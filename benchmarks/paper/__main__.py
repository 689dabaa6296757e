"""The reference paper's experiments, measured here: JSON and a plot for each part, then the page of all.

python benchmarks/paper --dir /mnt/nvme                      # everything, with 15 rounds: four hours or so
python benchmarks/paper --dir /mnt/nvme --minutes 35         # the most valuable cases of every part, within the time
python benchmarks/paper --dir /mnt/nvme --only peaks curve   # parts
python benchmarks/paper --dir /mnt/nvme --more               # the cases that have no result yet, or too few rounds
python benchmarks/paper --page                               # the page alone, of the results that are there
python benchmarks/paper --dir /mnt/nvme --beside "a build"   # for the page: what else used the machine
python benchmarks/paper --dir /mnt/nvme --device cuda --amp --shapes 8192x4 12288x3 16384x2 --seq 1024 --head 128

With `--minutes` every part has its share of the time that is left, and what a part leaves over goes to those behind it.
A case that has begun gets five rounds at least, so it may take longer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the other benchmarks

import system
from families import FAMILIES, Family

from paper import ablations, bubbles, fits, grows, instead, keep_or_not, micro, peaks
from paper.measure import Result, Setup
from paper.page import page
from paper.part import Part

MODULES = (peaks, keep_or_not, instead, fits, micro, ablations, grows, bubbles)
PARTS: tuple[Part, ...] = tuple(module.PART for module in MODULES)  # in the order of their value
RESULTS = system.ROOT / "docs" / "results" / "paper"
PAPERS: tuple[Family, ...] = ("gpt", "bert", "t5")  # families of the paper
SHAPES = ("512x4", "768x3", "1024x2")
QUICK = {"shapes": [(64, 2)], "batch": 2, "seq": 64, "rounds": 2, "warmup": 1, "vocabulary": 256}


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    parts = [part for part in PARTS if not flags.only or part.name in flags.only]
    if not flags.page:
        measure(flags, parts)
    else:
        write_page(flags)
    return 0


def write_page(flags: argparse.Namespace) -> None:
    to = flags.json_dir / "benchmarks.md"
    to.write_text(page(PARTS, flags.json_dir))
    print(f"wrote {to}", flush=True)


def measure(flags: argparse.Namespace, parts: Sequence[Part]) -> None:
    """Measure the parts, and write their files."""
    flags.json_dir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * flags.minutes
    where = system.machine(flags.dir)
    where["directory"] = where["directory"].rpartition(" on ")[2]
    where |= {"beside": flags.beside} if flags.beside else {}
    for number, part in enumerate(parts):
        left = end - time.monotonic()
        share = part.share / sum(each.share for each in parts[number:])
        before = measured(flags, part) if flags.more else {}
        done = frozenset(label for label, case in before.items() if case["rounds"] >= flags.rounds)
        until = time.monotonic() + share * left if math.isfinite(left) else math.inf
        start = time.monotonic()
        result = part.measure(replace(setup_of(flags, until), done=done))
        print(f"{part.name}: {(time.monotonic() - start) / 60:.1f} minutes", file=sys.stderr, flush=True)
        if result["cases"]:
            run = {"command": flags.command, "quick": flags.quick, "system": where}
            for case in result["cases"].values():
                case["run"] = run
            known = before | result["cases"]
            result["cases"] = {label: known[label] for label in result["planned"] if label in known}
            write(flags, part, result)
            write_page(flags)


def measured(flags: argparse.Namespace, part: Part) -> dict[str, Result]:
    """The cases of an earlier run."""
    path = flags.json_dir / f"{part.name}.json"
    found: dict[str, Result] = json.loads(path.read_text())["cases"] if path.exists() else {}
    return found


def write(flags: argparse.Namespace, part: Part, result: Result) -> None:
    system.write_json(flags.json_dir / f"{part.name}.json", result)
    if part.plot:
        (flags.json_dir / f"{part.name}.svg").write_text(part.plot(result))


def setup_of(flags: argparse.Namespace, until: float) -> Setup:
    names = ("dir", "quick", "rounds", "warmup", "families", "head", "batch", "seq", "vocabulary", "amp", "device")
    given = {name: getattr(flags, name) for name in (*names, "jemalloc")}
    return Setup(**given, shapes=tuple(flags.shapes), until=until)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", help="directory on the drive")
    add("--only", nargs="+", choices=[part.name for part in PARTS], help="parts; default: all")
    add("--json-dir", type=Path, default=RESULTS, help="where results are; elsewhere than %(default)s the page too")
    add("--minutes", type=float, default=math.inf, help="stop beginning cases behind so many; default: no limit")
    add("--more", action="store_true", help="only cases without a result of --rounds rounds; the others stay")
    add("--page", action="store_true", help="measure nothing")
    add("--quick", action="store_true", help="tiny shapes that only show that everything runs")
    add("--rounds", type=int, default=15, help="of every case; default %(default)s")
    add("--warmup", type=int, default=3, help="rounds before them; default %(default)s")
    add("--families", nargs="+", choices=FAMILIES, default=PAPERS)
    add("--shapes", nargs="+", type=_shape, default=[_shape(shape) for shape in SHAPES], help=f"default {SHAPES}")
    add("--head", type=int, default=64, help="width of an attention head; default %(default)s")
    add("--batch", type=int, default=16, help="default %(default)s")
    add("--seq", type=int, default=256, help="default %(default)s")
    add("--vocabulary", type=int, default=2048, help="default %(default)s")
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--device", default="cpu", help="cpu or cuda")
    add("--beside", default="", metavar="TEXT", help="what else uses the machine, for the page")
    add("--jemalloc", default="", help="the library, for Inductor under jemalloc")
    flags = parser.parse_args(arguments)
    if not (flags.page or flags.dir):
        parser.error("--dir is missing; right would be a directory on the drive")
    if flags.quick:
        vars(flags).update(QUICK)
    given = {flags.dir: "DIR", flags.jemalloc: "LIB.so"}  # paths of a machine say nothing on the page
    flags.command = f"python benchmarks/paper {' '.join(given.get(word, word) for word in arguments)}"
    return flags


def _shape(text: str) -> tuple[int, int]:
    width, _, layers = text.partition("x")
    if not (width.isdecimal() and layers.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; right would be WIDTHxLAYERS, such as 512x4")
    return int(width), int(layers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
