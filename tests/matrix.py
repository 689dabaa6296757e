"""The default tests under several versions of torch, each in an environment of its own; what came of it as a table.

python -m tests.matrix 2.11.0 2.13.0 2.15.0                      # make matrix
python -m tests.matrix 2.15.0 --pytest "-k dynamic"              # look into one

An environment is made once, in `--root`, from constraints.txt without torch and what torch itself pins. One line of
JSON for each version goes to `--results`, and `python -m tests.matrix --table RESULTS` prints the table of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_TORCH = ("torch", "torchvision", "sympy")  # whose versions follow torch's
HEAD = "| torch | passed | failed | skipped | failed tests |"
LISTED = 8


@dataclass(frozen=True)
class Outcome:
    """What one version's tests came to. `failures` are names of tests, `seconds` of the whole run."""

    torch: str
    python: str
    passed: int
    skipped: int
    failures: tuple[str, ...]
    seconds: float

    @staticmethod
    def read(torch: str, path: Path, seconds: float) -> Outcome:
        """Of JUnit's XML, as pytest writes it.

        Raises:
            OSError: pytest wrote none, for it did not get as far.
        """
        cases = list(ET.parse(path).iter("testcase"))
        failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = sum(c.find("skipped") is not None for c in cases)
        names = tuple(sorted({f"{c.get('classname')}::{c.get('name')}" for c in failed}))
        return Outcome(torch, platform.python_version(), len(cases) - len(failed) - skipped, skipped, names, seconds)

    def row(self) -> str:
        more = f", and {len(self.failures) - LISTED} more" if len(self.failures) > LISTED else ""
        named = ", ".join(f"`{name}`" for name in self.failures[:LISTED]) + more
        return f"| {self.torch} | {self.passed} | {len(self.failures)} | {self.skipped} | {named} |"


def without_torch(constraints: str) -> str:
    """The lines of a constraints file that do not pin torch or what follows it."""
    return "".join(line for line in constraints.splitlines(keepends=True) if line.split("==")[0] not in OF_TORCH)


def environment(root: Path, version: str, pip: Sequence[str]) -> Path:
    """The Python of an environment with that torch, this package and its tests; made where it is missing."""
    python, made = root / version / "bin" / "python", root / version / ".ssd_fx-installed"
    if not made.exists():
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", root / version], check=True)
        constraints = root / version / "constraints.txt"
        constraints.write_text(without_torch((ROOT / "constraints.txt").read_text()))
        install = [python, "-m", "pip", "install", "--quiet", *pip]
        subprocess.run([*install, f"torch=={version}"], check=True)
        subprocess.run([*install, "-c", constraints, "-e", f"{ROOT}[test]"], check=True)
        made.touch()
    return python


def tried(root: Path, version: str, pip: Sequence[str], pytest: Sequence[str]) -> Outcome:
    python, report = environment(root, version, pip), root / version / "report.xml"
    report.unlink(missing_ok=True)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(root / version / "inductor")}
    start = time.monotonic()
    subprocess.run([python, "-m", "pytest", "-q", *pytest, f"--junitxml={report}"], cwd=ROOT, env=os.environ | caches)
    return Outcome.read(version, report, time.monotonic() - start)


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown, by version; of two outcomes of one version the later one counts."""
    latest = {each.torch: each for each in outcomes}
    rows = [latest[version].row() for version in sorted(latest, key=lambda v: tuple(map(int, v.split("."))))]
    return "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *rows])


def read(path: Path) -> list[Outcome]:
    rows = map(json.loads, path.read_text().splitlines())
    return [Outcome(**(row | {"failures": tuple(row["failures"])})) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of torch, such as 2.13.0")
    parser.add_argument("--root", type=Path, default=ROOT / ".matrix", help="of the environments, default %(default)s")
    parser.add_argument("--results", type=Path, help="append a line of JSON for each version")
    parser.add_argument("--pip", default="", help="flags for pip, such as another index")
    parser.add_argument("--pytest", default="", help="flags for pytest")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="only print the table of these")
    flags = parser.parse_args()
    if flags.table:
        print(table(read(flags.table)))
        return
    outcomes = []
    for version in flags.versions:
        outcomes.append(tried(flags.root, version, shlex.split(flags.pip), shlex.split(flags.pytest)))
        if flags.results:
            with flags.results.open("a") as file:
                file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    print(table(outcomes))
    raise SystemExit(any(each.failures for each in outcomes))


if __name__ == "__main__":
    main()
