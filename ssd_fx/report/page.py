"""A report as one HTML file that needs nothing else: no server, no network.

`web/` has the page, its style and its script, and Apache ECharts 6.1.0 (`echarts.min.js`, Apache-2.0, unchanged from
npm), which draws. All of it and the data are put into one text.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ssd_fx.report.course import Bar, Curve, course, thinned
from ssd_fx.report.measured import MeasuredStep
from ssd_fx.report.model import GroupRow, Report, Span, Times
from ssd_fx.report.summary import lines
from ssd_fx.report.text import HOLDERS, holders
from ssd_fx.report.unfreed import asked, loud
from ssd_fx.runtime.trace import Event

POINTS = 1500  # of a curve
HEIGHT = 900  # pixels of the page in a notebook
WEB = Path(__file__).parent / "web"


def page(report: Report) -> str:
    """The text of the page."""
    found = (WEB / "page.html").read_text(encoding="utf-8")
    given = json.dumps(data(report), separators=(",", ":")).replace("</", "<\\/")
    for name, text in (
        ("style", (WEB / "page.css").read_text(encoding="utf-8")),
        ("echarts", (WEB / "echarts.min.js").read_text(encoding="utf-8")),
        ("script", (WEB / "page.js").read_text(encoding="utf-8")),
        ("data", given),
    ):
        before, _, behind = found.partition(f"/*{{{name}}}*/")
        found = before + text + behind
    return found


def save(report: Report, path: str | Path) -> None:
    """Write the page to `path`. A file is whole or as it was before; a device or a pipe is written to.

    Raises:
        OSError: the file cannot be written.
    """
    text, target = page(report), Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")  # an error for a directory
        else:
            _replace(Path(os.path.realpath(target)), text)  # a link stays one
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not where the link leads, nor the part


def _replace(target: Path, text: str) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, target)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def framed(report: Report) -> str:
    """The page within another one, as a notebook shows it."""
    style = f"width: 100%; height: {HEIGHT}px; border: 0"
    return f'<iframe title="ssd_fx report" style="{style}" srcdoc="{html.escape(page(report))}"></iframe>'


def data(report: Report) -> dict[str, Any]:
    """What the page shows. Times are milliseconds from the start of the step."""
    found = course(report)
    names = [f"{g.graph}{f' x {g.runs}' if g.runs > 1 else ''}" for g in report.graphs]
    return {
        "lines": lines(report),
        "graphs": names,
        "steps": report.stats.steps if report.stats else 0,
        "missed": loud(report),
        "unfreed": [
            {"nbytes": folded.nbytes, "who": who, "module": folded.name, "source": folded.where}
            for who, folded in holders(report)[:HOLDERS]
        ],
        "asked": asked(report),
        "floor": found.floor_bytes,
        "stock": _curve(found.stock),
        "own": _curve(found.own),
        "lanes": _predicted_lanes(found.own, found.bars),
        "measured": _measured(report.step),
        "groups": _rows(report, found.bars),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _spans(spans: Iterable[Span]) -> list[list[float]]:
    return [[_ms(begin), _ms(end)] for begin, end in sorted(spans)]


def _curve(curve: Curve) -> dict[str, Any]:
    points = [*curve.points, (curve.end_s, curve.points[-1][1] if curve.points else 0)]
    return {"turn": _ms(curve.turn_s), "end": _ms(curve.end_s), "points": _points(points)}


def _points(points: Sequence[tuple[float, int]]) -> list[list[float]]:
    return [[_ms(at), nbytes] for at, nbytes in thinned(points, POINTS)]


def _predicted_lanes(curve: Curve, bars: Sequence[Bar]) -> dict[str, Any]:
    waits = _spans(span for bar in bars for span in bar.times.waits)
    return {
        "compute": [_without([0.0, _ms(curve.turn_s)], waits), _without([_ms(curve.turn_s), _ms(curve.end_s)], waits)],
        "waits": waits,
        "writes": _spans(bar.times.write for bar in bars if bar.times.write is not None),
        "reads": _spans(bar.times.read for bar in bars if bar.times.read is not None),
    }


def _without(whole: Sequence[float], holes: Iterable[Sequence[float]]) -> list[list[float]]:
    """`whole`, less sorted `holes`."""
    left, at = [], whole[0]
    for begin, end in holes:
        if end <= at or begin >= whole[1]:
            continue
        if begin > at:
            left.append([at, begin])
        at = min(end, whole[1])
    return [*left, [at, whole[1]]] if at < whole[1] else left


def _measured(step: MeasuredStep | None) -> dict[str, Any] | None:
    if step is None:
        return None
    last = max((e.ended for e in step.events), default=0.0)
    waits = _events(step.waits)
    return {
        "turn": _ms(step.turn_s),
        "end": _ms(last),
        "points": _points(step.memory),
        "compute": [_without([0.0, _ms(step.turn_s)], waits), _without([_ms(step.turn_s), _ms(last)], waits)],
        "waits": waits,
        "writes": _events(step.transfers("write")),
        "reads": _events(step.transfers("read")),
    }


def _events(events: Iterable[Event]) -> list[list[float]]:
    return _spans((event.started, event.ended) for event in events)


def _rows(report: Report, bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """A row for every group in every run, in the order of production; those without times last."""
    seen = _seen(report)
    rows = []
    for bar in sorted(bars, key=lambda each: each.times.produced):
        row = bar.row
        run = bar.run if report.order.count(row.graph) > 1 else None
        rows.append(_row(row) | {"run": run, "times": _times(bar.times), "seen": seen.get((row.graph, row.slot))})
    others = [row for graph in report.graphs for row in graph.rows if row.times is None]
    return rows + [_row(row) | {"run": None, "times": None, "seen": None} for row in others]


def _times(life: Times) -> dict[str, Any]:
    points = {"produced": life.produced, "released": life.released, "used": life.used, "last": life.last_used}
    spans = {"write": life.write, "read": life.read, "gone": life.gone}
    return {
        **{name: _ms(at) for name, at in points.items()},
        **{name: span and [_ms(at) for at in span] for name, span in spans.items()},
        "waits": _spans(life.waits),
    }


def _row(row: GroupRow) -> dict[str, Any]:
    names = ("graph", "slot", "name", "module", "source", "nbytes", "stored_nbytes", "decision", "tier", "reason")
    found = {name: getattr(row, name) for name in (*names, "shared")}
    m = row.measured
    return found | {"counts": None if m is None else [m.freed, m.wasted, m.held, m.kept, m.why]}


def _seen(report: Report) -> dict[tuple[str, int], dict[str, list[float]]]:
    """The measured spans of the groups whose graph ran once: of several runs it is not known which one a load is of."""
    if report.step is None:
        return {}
    once = {name for name in report.step.order if report.step.order.count(name) == 1}
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for event in report.step.events:
        if event.graph in once and event.slot >= 0:
            found.setdefault((event.graph, event.slot), {})[event.kind] = [_ms(event.started), _ms(event.ended)]
    return found
