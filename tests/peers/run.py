"""Runs PyTorch's own test files with PyTorch's partitioner and with ours, and compares test by test.

    python -m tests.peers.run --tests DIR [--suite test_aotdispatch] [--out demo-out/peers]

Each file runs in a process of its own for each partitioner, with an Inductor cache of its own, on every saved tensor
(`min_bytes=0`, `budget=0`). A test that ends otherwise under ours than under PyTorch's is an error, unless
tests/peers/explained.py says why. Logs stay in the directory of --out, and a run that was stopped goes on there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.peers.plugin import names
from tests.peers.results import Run, compare, record
from tests.peers.sources import SUITES, Suite, how_to_get, import_paths, prepare

REPOSITORY = Path(__file__).parents[2]
_FINISHED = (0, 1, 5)  # pytest's: all passed, some failed, none left to run


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every test that runs ends under ours as it does under PyTorch's, or its difference is explained."""
    given = _parse(arguments)
    suites = [s for s in SUITES if s.find(given.tests) and (not given.suite or s.name in given.suite)]
    if not suites:
        print(how_to_get(), file=sys.stderr)
        return 2
    until = time.monotonic() + given.seconds
    finished = [run(s, p, given, until) for s in suites for p in given.partitioner]
    if not all(finished):
        print("the time is up; the same command goes on")
        return 3
    if set(given.partitioner) != {"stock", "ours"}:
        return 0
    compared = [compare(s.name, *(Run.read(_log(given.out, s, p)) for p in ("stock", "ours"))) for s in suites]
    for comparison in compared:
        print(comparison.summary())
        record(comparison, given.results)
    return int(not all(comparison.is_right for comparison in compared))


def _log(out: Path, suite: Suite, partitioner: str) -> Path:
    return out / f"{suite.name}.{partitioner}.jsonl"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers.run", description="PyTorch's own tests, stock and ours"
    )
    parser.add_argument("--tests", type=Path, action="append", default=[], help="a checkout; all are searched in turn")
    parser.add_argument("--suite", action="append", default=[], help="only this file, e.g. test_aotdispatch")
    parser.add_argument("--partitioner", action="append", choices=("stock", "ours", "flipped"), help="only this one")
    parser.add_argument("--engine", default="posix", choices=("posix", "memory"))
    parser.add_argument("--out", type=Path, default=Path("demo-out/peers"), help="for logs, caches and files")
    parser.add_argument("--results", help="append the comparison of each suite to this file, a line of JSON each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, between two tests")
    parser.add_argument("-k", default="", help="only tests of this name, as pytest says it")
    given = parser.parse_args(arguments)
    given.partitioner = given.partitioner or ["stock", "ours"]
    given.out = given.out.absolute()
    given.tests = [path.absolute() for path in given.tests]
    return given


def run(suite: Suite, partitioner: str, given: argparse.Namespace, until: float) -> bool:
    """Whether every test of the suite has run, before the time was up. A process that dies is followed by another."""
    file, log = prepare(suite, given.tests, given.out), _log(given.out, suite, partitioner)
    assert file is not None, suite
    while time.monotonic() < until:
        known = len(names(log))
        status = _process(file, log, partitioner, given, until)
        if status in _FINISHED:
            return True
        if len(names(log)) == known and time.monotonic() < until:
            raise SystemExit(f"{suite.name} cannot be run with {partitioner}: {log.with_suffix('.txt')} says why")
    return False


def _process(file: Path, log: Path, partitioner: str, given: argparse.Namespace, until: float) -> int:
    work, settings = given.out / partitioner, given.out / "pytest.ini"
    for part in ("cache", "files"):
        (work / part).mkdir(parents=True, exist_ok=True)
    settings.write_text("[pytest]\n")  # not those of this repository
    command = [sys.executable, "-m", "pytest", "-p", "tests.peers.plugin", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command += ["-c", str(settings), "--partitioner", partitioner, "--engine", given.engine]
    command += ["--directory", str(work / "files"), "--log", str(log), "--seconds", str(until - time.monotonic())]
    command += [*(["-k", given.k] if given.k else []), str(file)]
    paths = [REPOSITORY, *import_paths(given.tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SSD_FX_")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(work / "cache" / log.stem)}
    with log.with_suffix(".txt").open("a") as output:
        return subprocess.run(command, cwd=work, env=environment, stdout=output, stderr=output).returncode


if __name__ == "__main__":
    sys.exit(main())
