"""The trace as Chrome's JSON, alone or merged into a trace of torch.profiler.

Perfetto (ui.perfetto.dev) and chrome://tracing show it. Our ops take one row with the times of the host, and one for
each device with the times of that device. Transfers overlap, so they take as many rows as run at a time.
torch.profiler's times are microseconds since its `baseTimeNanoseconds` on the wall clock; ours are converted to these.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from ssd_fx.runtime import plans, stats, trace
from ssd_fx.runtime.device import device_trace

_OURS = "ssd_fx"  # the category of our events, and the key of what `ssd-fx report` needs besides them
_PLACES = {"memory", "disk", "none", "lost", "ok", "failed", "cancelled"}  # of the host's events; a device has its own
_FIRST_ROW = 1 << 30  # torch.profiler's row numbers are thread ids, which stay below this
_TRANSFERS = ("write", "read")


def export(path: str | os.PathLike[str], profile: str | os.PathLike[str] | None = None) -> int:
    """Write the recorded events to `path` as JSON for ui.perfetto.dev, and return how many there are.

    Args:
        path: the file to write.
        profile: a file that `torch.profiler.profile.export_chrome_trace` wrote for the same process. Its events are
            written beside ours.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: `profile` is no trace of torch.profiler.
    """
    merged: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    base_ns = 0
    if profile is not None:
        merged = _read(profile)
        base_ns = merged["baseTimeNanoseconds"]
    rows = [("ops", event) for event in trace.events()]
    rows += [(f"ops on {event.where}", event) for event in device_trace.events()]
    merged["traceEvents"] += _chrome(rows, base_ns)
    slots = {name: {slot: asdict(each) for slot, each in own.items()} for name, own in stats.slots().items()}
    merged[_OURS] = {"plans": plans.packed(), "stats": asdict(stats.stats()), "slots": slots}
    Path(path).write_text(json.dumps(merged))
    return len(rows)


class Exported(NamedTuple):
    """What `export` wrote. `plans`: packed, by graph. `slots`: by graph and slot. `events`: of the host."""

    plans: dict[str, str]
    stats: stats.Stats
    slots: dict[str, dict[int, stats.SlotStats]]
    events: list[trace.Event]


def read(path: str | os.PathLike[str]) -> Exported:
    """What `export` wrote to `path`.

    Raises:
        OSError: the file cannot be read.
        ValueError, KeyError, TypeError, AttributeError: neither this version's `export` wrote it, nor a compatible one.
    """
    found = json.loads(Path(path).read_text())
    ours = found[_OURS]
    known = {f.name: ours["stats"][f.name] for f in fields(stats.Stats) if f.name in ours["stats"]}
    known["graphs"] = {graph: stats.GraphStats(**each) for graph, each in ours["stats"]["graphs"].items()}
    slots = {
        graph: {int(s): stats.SlotStats(**each) for s, each in own.items()} for graph, own in ours["slots"].items()
    }
    spans = [each["args"] for each in found["traceEvents"] if each.get("ph") == "X" and each.get("cat") == _OURS]
    events = [trace.Event(**each) for each in spans if each["where"] in _PLACES]
    return Exported(ours["plans"], stats.Stats(**known), slots, events)


def _read(profile: str | os.PathLike[str]) -> dict[str, Any]:
    wrong = ValueError(f"{profile} is no trace of torch.profiler; right would be what its export_chrome_trace wrote")
    try:
        found = json.loads(Path(profile).read_text())
    except json.JSONDecodeError as error:
        raise wrong from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise wrong
    if not isinstance(found.get("baseTimeNanoseconds"), int):
        raise wrong
    return found


def _chrome(events: list[tuple[str, trace.Event]], base_ns: int) -> list[dict[str, Any]]:
    """Complete events ("X") of this process, and the names of their rows.

    `events`: each with the row that it takes unless it is a transfer.
    """
    ahead_ns = time.time_ns() - time.perf_counter_ns() - base_ns
    rows: dict[str, int] = {}
    free_at: dict[str, float] = {}
    made = []
    for ops, event in sorted(events, key=lambda each: each[1].started):
        kind, slot, started = event.kind, event.slot, event.started
        row = _free_row(kind, started, free_at) if kind in _TRANSFERS else ops
        free_at[row] = event.ended
        name = f"{kind} {plans.where(event.graph, slot) or f'slot {slot}'}" if slot >= 0 else kind
        of = {"pid": os.getpid(), "tid": rows.setdefault(row, _FIRST_ROW + len(rows)), "args": event._asdict()}
        span = {"ts": (started * 1e9 + ahead_ns) / 1e3, "dur": (event.ended - started) * 1e6}
        made.append({"ph": "X", "cat": _OURS, "name": name, **of, **span})
        if event.live:
            memory = {"name": "large CPU tensors", "args": {"bytes": event.live}}
            made.append({"ph": "C", "cat": _OURS, "pid": os.getpid(), "ts": span["ts"] + span["dur"], **memory})
    named = {"ph": "M", "name": "thread_name", "pid": os.getpid()}
    return [*(named | {"tid": number, "args": {"name": f"ssd_fx {row}"}} for row, number in rows.items()), *made]


def _free_row(kind: str, started: float, free_at: dict[str, float]) -> str:
    number = 0
    while free_at.get(f"{kind} {number}", 0.0) > started:
        number += 1
    return f"{kind} {number}"
