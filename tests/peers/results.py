"""What became of every test, with PyTorch's partitioner and with ours, side by side: records, and markdown of them.

python -m tests.peers.results docs/results/peers.jsonl      the section "PyTorch's own suites" of docs/compatibility.md
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.peers.explained import EXPLAINED

VARIABLE = "PEERS_RESULTS"  # the file that records are appended to; without it they are not kept
OUTCOMES = ("passed", "failed", "skipped", "xfailed", "crashed")
SUITE_HEAD = (
    "| suite | stock: passed, failed, skipped | ours: passed, failed, skipped | partitioned by ours | offloaded |"
)


@dataclass(frozen=True)
class Run:
    """One suite with one partitioner: what became of each test, and what our partitioner did for it."""

    outcomes: Mapping[str, str]
    calls: int
    groups: int

    @staticmethod
    def read(log: Path) -> Run:
        """Of a log of `tests.peers.plugin`. A test that began and did not end took its process along."""
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        outcomes = {line["started"]: "crashed" for line in lines if "started" in line}
        ended = [line for line in lines if "name" in line]
        outcomes |= {line["name"]: line["outcome"] for line in ended}
        return Run(outcomes, sum(line["calls"] for line in ended), sum(line["groups"] for line in ended))

    def counts(self) -> dict[str, int]:
        found = Counter(self.outcomes.values())
        return {outcome: found[outcome] for outcome in OUTCOMES}


@dataclass(frozen=True)
class Difference:
    """A test that ends otherwise; `reason` is empty where nobody has explained it."""

    test: str
    stock: str
    ours: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """One suite. `outdated`: tests whose difference is explained and that do not differ."""

    suite: str
    stock: dict[str, int]
    ours: dict[str, int]
    calls: int
    groups: int
    differences: tuple[Difference, ...]
    outdated: tuple[str, ...]

    @property
    def unexplained(self) -> list[Difference]:
        return [d for d in self.differences if not d.reason]

    @property
    def is_right(self) -> bool:
        """Whether every difference is explained, and our partitioner was there: it may find nothing to offload only
        where no test that ran partitions anything."""
        return not self.unexplained and not self.outdated and bool(self.groups or not self.calls)

    def summary(self) -> str:
        lines = [f"{self.suite}: stock {_counts(self.stock)}, ours {_counts(self.ours)} (passed, failed, skipped)"]
        lines += [f"  {self.calls} graphs partitioned by ours, {self.groups} alias groups offloaded"]
        lines += [f"  {d.test}: {d.stock} -> {d.ours}: {d.reason or 'NOT EXPLAINED'}" for d in self.differences]
        lines += [f"  {test}: explained, but does not differ" for test in self.outdated]
        return "\n".join(lines)


def compare(suite: str, stock: Run, ours: Run, explained: Mapping[str, str] | None = None) -> Comparison:
    """Test by test. `explained`: reasons by test; None for those of tests/peers/explained.py."""
    reasons = EXPLAINED.get(suite, {}) if explained is None else explained
    tests = sorted(stock.outcomes.keys() | ours.outcomes.keys())
    pairs = {t: (stock.outcomes.get(t, "not run"), ours.outcomes.get(t, "not run")) for t in tests}
    apart = {t: pair for t, pair in pairs.items() if pair[0] != pair[1]}
    differences = tuple(Difference(t, *pair, reasons.get(t, "")) for t, pair in apart.items())
    outdated = tuple(t for t in reasons if t in pairs and t not in apart)
    return Comparison(suite, stock.counts(), ours.counts(), ours.calls, ours.groups, differences, outdated)


@dataclass(frozen=True)
class OpRecord:
    """One operator with one type: as `op_info.Verdict`, over its samples; `seen`: whether the planted fault shows."""

    op: str
    stock: str
    ours: str
    groups: int
    seen: bool


def record(result: Comparison | OpRecord, path: str | None = None) -> None:
    """Append to the file, or to the one that the environment names, if it does."""
    path = path or os.environ.get(VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def peer_section(records: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of records as `record` wrote them; of two of one suite or operator the later one counts."""
    known = list(records)
    suites = list({r["suite"]: r for r in known if "suite" in r}.values())
    ops = list({r["op"]: r for r in known if "op" in r}.values())
    parts = ["## PyTorch's own suites"]
    if suites:
        parts += [_SUITES, "\n".join([SUITE_HEAD, "|" + "---|" * (SUITE_HEAD.count("|") - 1), *map(_row, suites)])]
        parts += ["Every test that ends otherwise, and why:", _differences(suites)]
    if ops:
        parts += [_operators(ops)]
    return "\n\n".join(parts) + "\n"


_SUITES = """\
PyTorch's test files of AOTAutograd, its caches, partitioners and activation checkpointing, unmodified, with its own
partitioners and with ours in their place (`min_bytes=0`, `budget=0`, files on a drive). An expected failure counts as
passed."""


def _row(suite: Mapping[str, Any]) -> str:
    counts = f"{_counts(suite['stock'])} | {_counts(suite['ours'])}"
    return f"| {suite['suite']} | {counts} | {suite['calls']} graphs | {suite['groups']} groups |"


def _counts(counts: Mapping[str, int]) -> str:
    passed, failed = counts["passed"] + counts["xfailed"], counts["failed"] + counts["crashed"]
    return f"{passed}, {failed}, {counts['skipped']}"


def _differences(suites: Iterable[Mapping[str, Any]]) -> str:
    by_reason: dict[str, list[str]] = {}
    for suite in suites:
        for d in suite["differences"]:
            by_reason.setdefault(d["reason"] or "NOT EXPLAINED", []).append(f"{suite['suite']} `{d['test']}`")
    return "\n".join(f"* {reason}: {', '.join(tests)}" for reason, tests in by_reason.items()) or "* none"


def _operators(ops: list[Mapping[str, Any]]) -> str:
    trained, wrong = [r for r in ops if not r["stock"]], [r for r in ops if r["ours"]]
    equal = sum(not r["ours"] for r in trained)
    offloaded, seen = sum(r["groups"] > 0 for r in ops), sum(r["seen"] for r in ops)
    text = f"""\
OpInfo: gradients of `op(x * one) * one` for {len(ops)} cases of `op_db`: each operator, in float32 (its sizes as they
are, and dynamic), complex64, bfloat16 and float64, as a function and in place, read from the drive and given away from
memory. Stock trains {len(trained)} of them as eager mode does; ours computes {equal} of these bit by bit
as stock does. The other {len(ops) - len(trained)} stock refuses, or it is not near eager mode (mostly other random
numbers); ours does the same. Something was offloaded in {offloaded}; a sign flipped at every load shows in {seen}."""
    return "\n".join([text, *(f"* `{r['op']}`: {r['ours']}" for r in wrong)])


def main() -> None:
    print(peer_section([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), end="")


if __name__ == "__main__":
    main()
