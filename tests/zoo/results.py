"""What the zoo's tests found, one line of JSON each, and the table of docs/compatibility.md made of them.

python -m tests.zoo.results RESULTS > docs/compatibility.md
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.zoo.trial import Trial

VARIABLE = "ZOO_RESULTS"  # the file that results are appended to; without it they are not kept
HEAD = "| model | inner | dropout | status | saved | to disk | largest gradient difference | graph breaks |"


@dataclass(frozen=True)
class Result:
    """One model, trained in one way; `trial` is None where it is not supported, and `reason` says why."""

    name: str
    inner: str
    dropout: float
    trial: Trial | None
    difference: float
    reason: str = ""

    def row(self) -> dict[str, object]:
        own = ("name", "inner", "dropout", "difference", "reason")
        counted = ("saved_bytes", "offloaded_bytes", "written_bytes", "graph_breaks")
        return {k: getattr(self, k) for k in own} | {k: getattr(self.trial, k, 0) for k in counted}


def record(result: Result) -> None:
    """Append to the file that the environment names, if it does."""
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(result.row()) + "\n")


def table(rows: Iterable[dict[str, object]]) -> str:
    """Markdown; of two results of one test the later one counts."""
    latest = {(r["name"], r["inner"], r["dropout"]): r for r in rows}
    return "\n".join([HEAD, "|" + "---|" * HEAD.count(" |"), *map(_line, latest.values())])


def _line(row: dict[str, object]) -> str:
    start = f"| {row['name']} | {row['inner']} | {row['dropout']:g} |"
    if row["reason"]:
        return f"{start} not supported: {row['reason']} | | | | |"
    saved, disk = (int(str(row[name])) / 1e3 for name in ("saved_bytes", "written_bytes"))
    return f"{start} bitwise | {saved:.0f} kB | {disk:.0f} kB | {row['difference']:g} | {row['graph_breaks']} |"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print(
        "# Compatibility\n\nMade by `make zoo`: tiny configurations with random weights, three steps each, `budget=0`, "
    )
    print("`min_bytes=0`. Bytes are of one step. The difference is to the same kernels with everything kept in memory.")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, no GPU.\n")
    print(table(rows))


if __name__ == "__main__":
    main()
