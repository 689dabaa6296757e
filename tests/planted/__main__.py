"""The command; `tests/planted/__init__.py` says how to use it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.planted.faults import FAULTS
from tests.planted.results import NOT_FOUND, read, record, table
from tests.planted.run import trial


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="plant only these faults")
    parser.add_argument("--results", type=Path, help="keep a line of JSON for each fault")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="only print the table of these")
    flags = parser.parse_args()
    if flags.table:
        print(table(FAULTS, read(flags.table)))
        return
    missed = []
    with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as scratch:
        for fault in FAULTS:
            if flags.only and fault.name not in flags.only:
                continue
            found = trial(fault, Path(scratch))
            print(f"{fault.name}: {found.found_by} ({found.seconds:.0f} s)", flush=True)
            if flags.results:
                record(flags.results, fault.name, found.found_by, found.seconds)
            if found.found_by == NOT_FOUND:
                missed.append(fault.name)
    raise SystemExit(f"not found: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
