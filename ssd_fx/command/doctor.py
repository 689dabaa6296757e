"""The command `ssd-fx doctor`: what this machine offers, what is in the way, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

from ssd_fx.command import directories, limits, software
from ssd_fx.command.findings import Finding, summary, worst
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.errors import without_number

_EXAMPLES = """examples:
  ssd-fx doctor                     versions, compiler, device, limits, measured rates
  ssd-fx doctor /mnt/nvme           and whether the directory is fit, and how fast it is
  ssd-fx doctor /mnt/a /mnt/b --json | jq .directories

exit status: 0 fine, perhaps with warnings; 1 something is bad, or a directory does not exist; 2 wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "doctor",
        help="look at versions, compiler, drives, rates, wear and limits",
        description="Say what this machine offers, what is in the way, and what to do about it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    said = "where activations would go; 256 MiB are written and read there"
    parser.add_argument("directory", nargs="*", type=os.path.expanduser, help=said)
    parser.add_argument(
        "--json", action="store_true", help="print JSON; figures are in bytes, bytes a second and seconds"
    )
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Print what was found, and return the exit status: 1 if something is bad."""
    if not flags.json and (missing := _missing(flags.directory)):
        print(*(f"ssd-fx: {each}" for each in missing), sep="\n", file=sys.stderr)
        return 1
    machine = _told(chain(software.findings(flags.directory), limits.findings()), flags.json)
    found: dict[str, list[Finding]] = {}
    for each in flags.directory:
        if not flags.json:
            print(f"\n{os.path.abspath(each)}", flush=True)
        found[os.path.abspath(each)] = _told(directories.findings(each), flags.json)
    everything = [*machine, *(finding for each in found.values() for finding in each)]
    status = worst(everything)
    if flags.json:
        by_directory = {path: [asdict(finding) for finding in each] for path, each in found.items()}
        shown = {"status": status, "machine": [asdict(each) for each in machine], "directories": by_directory}
        print(json.dumps(shown, indent=1))
    else:
        print(f"\n{summary(everything)}")
    return 1 if status == "bad" else 0


def _missing(paths: Iterable[str]) -> list[str]:
    """A line about each of `paths` that does not exist. Other errors stand among the findings."""
    missing = []
    for path in paths:
        try:
            check_directory(path)
        except FileNotFoundError as error:
            missing.append(without_number(error))
        except OSError:
            continue
    return missing


def _told(findings: Iterable[Finding], as_json: bool) -> list[Finding]:
    """All findings, printed as they come, unless they are printed as JSON at the end."""
    found = []
    for each in findings:
        if not as_json:
            print(each, flush=True)
        found.append(each)
    return found
