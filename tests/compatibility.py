"""What tests found out about compatibility, one line of JSON each, and docs/compatibility.md made of them.

python -m tests.compatibility docs/results > docs/compatibility.md     # make compatibility

The directory has the records of every suite, so that the page needs not all of them run anew: `tests.jsonl` of the
tests that append to the file that COMPATIBILITY_RESULTS names, `peers.jsonl` of tests/peers, `matrix.jsonl` of
tests/matrix.py. Of two records of one thing the later one counts, and `--tidy` drops the earlier.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tests import matrix
from tests.peers.results import peer_section

VARIABLE = "COMPATIBILITY_RESULTS"  # the file that results are appended to; without it they are not kept
HEAD = "| {what} | inner | status | saved | to disk | largest gradient difference | graph breaks |"

Section = Literal["models", "training loops", "trainers", "ways of working", "several processes"]
ABOUT: dict[Section, tuple[str, str]] = {
    "models": (
        "model",
        "Tiny configurations of transformers and timm with random weights, three steps each, with dropout and without "
        "(`tests/zoo`). Inductor's rows are near plain Inductor in the first step as well. *recomputed*: with dropout, "
        "planned for a drive so slow that what can be is computed again (`recompute=True`, the default).",
    ),
    "training loops": (
        "loop",
        "`tests/loops`, on a small network. *ssd checkpoints*: `ssd_fx.checkpoint` around its blocks, beside PyTorch's "
        "checkpoint.",
    ),
    "trainers": ("trainer", "The scripts in `examples/trainers`; [how to](trainers.md)."),
    "ways of working": ("way", "Other people's packages, tiny models (`make ways`); [how to](trainers.md)."),
    "several processes": ("parallelism", "`torchrun` with gloo on the CPU (`tests/distributed`); bytes of all ranks."),
}


@dataclass(frozen=True)
class Result:
    """One thing tried: bytes of all its steps, the largest difference of any loss or gradient; or the `reason` why it
    is not supported. `graph_breaks` is None where they are not counted."""

    section: Section
    name: str
    inner: str
    saved_bytes: int = 0
    written_bytes: int = 0
    difference: float = 0.0
    graph_breaks: int | None = None
    reason: str = ""
    torch: str = torch.__version__


def record(result: Result) -> None:
    """Append to the file that the environment names, if it does."""
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def page(results: Iterable[Result], peers: Iterable[Mapping[str, Any]], versions: Iterable[matrix.Outcome]) -> str:
    """Markdown; of two results of one thing the later one counts, and a section without any says so."""
    latest = {(r.section, r.name, r.inner): r for r in results}
    used = ", ".join(sorted({r.torch for r in latest.values()}))
    parts = [f"{INTRODUCTION}\n\ntorch {used}, Python {platform.python_version()}, {platform.machine()}."]
    for section, (what, about) in ABOUT.items():
        own = [r for r in latest.values() if r.section == section]
        lines = [_line(r) for r in sorted(own, key=lambda r: (r.name.casefold(), r.inner))]
        head = HEAD.format(what=what)
        table = "\n".join([head, "|" + "---|" * (head.count("|") - 1), *lines]) if lines else NOT_RUN
        parts += [f"## {section.capitalize()}", about, table]
    known, tried = list(peers), list(versions)
    parts += [peer_section(known).strip() if known else f"## PyTorch's own suites\n\n{NOT_RUN}"]
    parts += ["## Versions of torch", "The default tests (`make matrix`).", matrix.table(tried) if tried else NOT_RUN]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """\
# Compatibility

Made by `make compatibility` from the results of tests. Everything that can leave goes to disk (`budget=0`,
`min_bytes=0`), and nothing is computed again instead (`recompute=False`) but where the row says so. The difference is
to the same kernels with everything kept in memory: under `aot_eager` nothing is offloaded in the other run, under
Inductor the same generated code moves no bytes. What plain `torch.compile` does not compile is listed as such."""
NOT_RUN = "Not run for this page."


def _line(result: Result) -> str:
    start = f"| {result.name} | {result.inner} |"
    if result.reason:
        return f"{start} not supported: {result.reason} | | | | |"
    breaks = "" if result.graph_breaks is None else result.graph_breaks
    saved, disk = _size(result.saved_bytes), _size(result.written_bytes)
    status = "bitwise" if result.difference == 0 else "DIFFERS"
    return f"{start} {status} | {saved} | {disk} | {result.difference:g} | {breaks} |"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"


def read(path: Path) -> list[Any]:
    """Of one suite; empty where it was never run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tidy(path: Path) -> None:
    """Leave the last record of each thing: what a record is of are its first fields."""
    names = ("section", "name", "inner", "suite", "op", "torch")
    rows = read(path)
    latest = {tuple(row.get(name) for name in names if name != "torch" or "python" in row): row for row in rows}
    path.write_text("".join(json.dumps(row) + "\n" for row in latest.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the directory of records")
    parser.add_argument("--tidy", action="store_true", help="drop records that later ones have overtaken")
    flags = parser.parse_args()
    tests, peers, versions = (flags.results / f"{name}.jsonl" for name in ("tests", "peers", "matrix"))
    for path in (tests, peers, versions) if flags.tidy else ():
        if path.exists():
            tidy(path)
    found = [Result(**row) for row in read(tests)]
    print(page(found, read(peers), matrix.read(versions) if versions.exists() else []), end="")


if __name__ == "__main__":
    main()
