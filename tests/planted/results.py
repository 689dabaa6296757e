"""What came of the planted faults: a line of JSON for each, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.planted.fault import Fault

NOT_FOUND = "not found"
HEAD = "| fault | in | hazard | at first found by | now found by | seconds |"


@dataclass(frozen=True)
class Result:
    """`first`, `now`: the test that found the fault when it was first planted, and the last time; or `NOT_FOUND`.

    `seconds`: of the last time, until the fault was found.
    """

    name: str
    first: str
    now: str
    seconds: int


def read(path: Path) -> dict[str, Result]:
    """The results by name of the fault; none where there is no such file."""
    if not path.exists():
        return {}
    return {row["name"]: Result(**row) for row in map(json.loads, path.read_text().splitlines())}


def record(path: Path, name: str, found_by: str, seconds: float) -> None:
    """Write a result into the file, which keeps what the first run found."""
    rows = read(path)
    first = rows[name].first if name in rows else found_by
    rows[name] = Result(name, first, found_by, round(seconds))
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows.values()))


def table(faults: Sequence[Fault], rows: dict[str, Result]) -> str:
    """A page of Markdown, in the order of the faults."""
    known = [(fault, rows[fault.name]) for fault in faults if fault.name in rows]
    first, now = (sum(getattr(row, when) != NOT_FOUND for _, row in known) for when in ("first", "now"))
    lines = [
        "# Planted faults",
        "",
        "`python -m tests.planted --table docs/results/planted.jsonl > docs/results/planted.md` makes this page.",
        f"Of {len(known)} faults the default tests found {first} when they were first planted. Now they find {now}.",
        "",
        HEAD,
        "|" + "---|" * (HEAD.count("|") - 1),
    ]
    for fault, row in known:
        cells = (fault.name, fault.file, fault.hazard, _short(row.first), _short(row.now), row.seconds)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _short(test: str) -> str:
    """A test without its parameters, which a page need not have."""
    return test if test == NOT_FOUND else f"`{test.split('[')[0].removeprefix('tests/')}`"
