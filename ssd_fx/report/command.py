"""`ssd-fx report trace.json`: the report of a run, from the trace that it wrote."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from ssd_fx.refusal import refusing
from ssd_fx.report.model import Report
from ssd_fx.report.saved import read


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser("report", help="what a run did, from the trace that ssd_fx.export_trace wrote")
    parser.add_argument("trace", type=os.path.expanduser, help="the file")
    add_output(parser)
    parser.set_defaults(run=run)


def add_output(parser: Any) -> None:
    """Add the flags that say what becomes of a report."""
    said = "write the page as well, e.g. report.html"
    parser.add_argument("-o", "--output", metavar="FILE", type=os.path.expanduser, help=said)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the text")


def run(flags: argparse.Namespace) -> int:
    """Run the command, and return its exit status. 1: the trace cannot be used, or the page cannot be written."""
    return tell(lambda: read(flags.trace), flags)


def tell(made: Callable[[], Report], flags: argparse.Namespace) -> int:
    """Make the report, write the page, if one is asked for, and print it; return the exit status."""
    with refusing(1):
        report = made()
        if flags.output:
            report.save(flags.output)
    print(json.dumps(report.to_dict(), indent=1) if flags.json else report)
    return 0
