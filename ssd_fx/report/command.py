"""`ssd-fx report trace.json`: the report of a run, from the trace that `ssd_fx.export_trace` wrote."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssd_fx.refusal import refusing
from ssd_fx.report.model import GraphReport, step_of
from ssd_fx.report.report import Report, made
from ssd_fx.report.text import lines
from ssd_fx.report.timeline import measured
from ssd_fx.runtime import chrome
from ssd_fx.runtime.errors import first_line

_EXAMPLES = """examples:
  ssd-fx report trace.json
  ssd-fx report trace.json -o report.html

exit status: 0 fine; 1 the trace cannot be used, or the page cannot be written; 2 wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "report",
        help="what a run did, from the trace that ssd_fx.export_trace wrote",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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


def read(path: str | Path) -> Report:
    """The report of the process that wrote a trace.

    Raises:
        ValueError: the file is no such trace, or no step ran before it was written; one line says which.
        OSError: the file cannot be read.
    """
    wrong = f"{path} is no trace of ssd_fx; right would be a file that ssd_fx.export_trace(path) wrote after a step"
    try:
        found = chrome.read(path)
        step = measured(found.events)
        plans = [GraphReport.unpacked(found.plans[graph]) for graph in found.stats.graphs if graph in found.plans]
        graphs = step_of(plans, step)
        report = made(graphs, step.order if step else (), stats=found.stats, slots=found.slots, step=step)
        if graphs:
            lines(report)  # asks for all that a plan says, which is other things in another version
    except OSError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{wrong} ({_said(error)})") from None
    if not graphs:
        raise ValueError(f"{path} has no step: {found.stats.nothing_ran()}")
    return report


def _said(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else first_line(error)
