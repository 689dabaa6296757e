"""A report from a file that `ssd_fx.export_trace` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ssd_fx.report.measured import last_step
from ssd_fx.report.model import Report, made, step_of
from ssd_fx.report.summary import lines
from ssd_fx.runtime.chrome import OURS
from ssd_fx.runtime.errors import first_line
from ssd_fx.runtime.plans import unpack
from ssd_fx.runtime.stats import GraphStats, SlotStats, Stats
from ssd_fx.runtime.trace import Event

_PLACES = {"memory", "disk", "none", "lost", "ok", "failed", "cancelled"}  # of the host's events; a device has its own


def read(path: str | Path) -> Report:
    """The report of the process that wrote a trace.

    Raises:
        ValueError: the file is no such trace, or no step ran before it was written; one line says which.
        OSError: the file cannot be read.
    """
    wrong = f"{path} is no trace of ssd_fx; right would be a file that ssd_fx.export_trace(path) wrote after a step"
    try:
        found = json.loads(Path(path).read_text())
        ours = found[OURS]
        counts = _stats(ours["stats"])
        plans = {graph: unpack(about) for graph, about in ours["plans"].items()}
        slots = {graph: {int(s): SlotStats(**each) for s, each in own.items()} for graph, own in ours["slots"].items()}
        step = last_step(_event(each) for each in found["traceEvents"] if _is_ours(each))
        described = step_of([plans[graph] for graph in counts.graphs if graph in plans], step)
        report = made(described, step.order if step else (), stats=counts, slots=slots, step=step)
        if described:
            lines(report)  # asks for all that a plan says, which is other things in another version
    except OSError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{wrong} ({_said(error)})") from None
    if not described:
        raise ValueError(f"{path} has no step: {counts.nothing_ran()}")
    return report


def _said(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else first_line(error)


def _stats(given: Mapping[str, Any]) -> Stats:
    known = {f.name for f in fields(Stats)} - {"graphs"}
    graphs = {name: GraphStats(**each) for name, each in given["graphs"].items()}
    return Stats(**{name: value for name, value in given.items() if name in known}, graphs=graphs)


def _is_ours(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") == OURS and event["args"]["where"] in _PLACES


def _event(event: Mapping[str, Any]) -> Event:
    args, started = event["args"], event["ts"] / 1e6
    kind = event["name"].partition(" ")[0]
    ended = started + event["dur"] / 1e6
    moved = args["bytes"], args["where"], args["engine"], args["live"], args["waited"], args["step"]
    return Event(kind, args["graph"], args["slot"], args["seq"], started, ended, *moved)
