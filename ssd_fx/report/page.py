"""A report as one HTML file that needs nothing else: no server, no network.

`web/` has the page, its style and its script, and Apache ECharts 6.1.0 (`echarts.min.js`, Apache-2.0, unchanged from
npm), which draws. All of it and the data are put into one text.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ssd_fx.report.figures import figures, stalls
from ssd_fx.report.model import Facts
from ssd_fx.report.text import FEW, lines
from ssd_fx.report.timeline import UNKNOWN, Span, Timeline, thinned
from ssd_fx.report.unfreed import asked, holders, loud
from ssd_fx.runtime.build import replace_text

POINTS = 1500  # of a curve
HEIGHT = 900  # pixels of the page in a notebook
WEB = Path(__file__).parent / "web"


def page(known: Facts) -> str:
    """The text of the page."""
    found = (WEB / "page.html").read_text(encoding="utf-8")
    given = json.dumps(data(known), separators=(",", ":")).replace("</", "<\\/")
    for name, text in (
        ("style", (WEB / "page.css").read_text(encoding="utf-8")),
        ("echarts", (WEB / "echarts.min.js").read_text(encoding="utf-8")),
        ("script", (WEB / "page.js").read_text(encoding="utf-8")),
        ("data", given),
    ):
        before, _, behind = found.partition(f"/*{{{name}}}*/")
        found = before + text + behind
    return found


def save(known: Facts, path: str | Path) -> None:
    """Write the page to `path`. A file is whole or as it was before; a device or a pipe is written to.

    Raises:
        OSError: the file cannot be written.
    """
    text, target = page(known), Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")  # an error for a directory
        else:
            replace_text(Path(os.path.realpath(target)), text)  # a link stays one
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not where the link leads, nor the part


def framed(known: Facts) -> str:
    """The page within another one, as a notebook shows it."""
    style = f"width: 100%; height: {HEIGHT}px; border: 0"
    return f'<iframe title="ssd_fx report" style="{style}" srcdoc="{html.escape(page(known))}"></iframe>'


def data(known: Facts) -> dict[str, Any]:
    """What the page shows. Times are milliseconds from the start of the step."""
    return {
        "lines": lines(known),
        "graphs": [f"{g.graph}{f' x {g.runs}' if g.runs > 1 else ''}" for g in known.graphs],
        "steps": known.stats.steps if known.stats else 0,
        "missed": loud(known),
        "unfreed": [
            {"nbytes": held.sums[0], "who": held.what, "module": held.name, "source": held.where}
            for held in holders(known)[:FEW]
        ],
        "asked": asked(known),
        "stalls": [
            {"module": layers.name, "source": layers.where, "seconds": layers.sums} for layers in stalls(known)[:FEW]
        ],
        "floor": figures(known).floor_bytes,
        "stock": _step(known.stock),
        "own": _step(known.planned),
        "measured": known.step and _step(known.step),
        "groups": _groups(known),
    }


def _ms(*seconds: float) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]


def _step(step: Timeline) -> dict[str, Any]:
    """Memory and lanes of a step, predicted or measured."""
    turn, end = _ms(step.turn_s, step.end_s)
    points = [*step.memory, (step.end_s, step.memory[-1][1])] if step.memory else []
    waits = _spans(step.waits)
    return {
        "turn": turn,
        "end": end,
        "points": [[*_ms(at), nbytes] for at, nbytes in thinned(points, POINTS)],
        "compute": [_without([0.0, turn], waits), _without([turn, end], waits)],
        "waits": waits,
        "writes": _spans(step.of("write")),
        "reads": _spans(step.of("read")),
    }


def _spans(spans: Iterable[Span]) -> list[list[float]]:
    return sorted(_ms(span.begin, span.end) for span in spans)


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


def _groups(known: Facts) -> list[dict[str, Any]]:
    """Every group in every run, in the order of production; those without times last.

    Measured times are there if its graph ran once: with several runs it is not known to which one a load belongs.
    """
    rows = {(row.graph, row.slot): row for row in known.groups}
    seen = known.step.times() if known.step else {}
    found = []
    for (graph, slot, run), times in sorted(known.planned.times().items(), key=lambda each: each[1]["store"].begin):
        once = known.order.count(graph) == 1
        run_and_times = {
            "run": None if once else run,
            "times": _moments(times),
            "seen": _moments(seen.get((graph, slot, UNKNOWN), {})) if once else {},
        }
        found.append(asdict(rows[graph, slot]) | run_and_times)
    return found + [asdict(row) | {"run": None, "times": None, "seen": {}} for row in known.groups if not row.times]


def _moments(times: Mapping[str, Span]) -> dict[str, list[float]]:
    return {kind: _ms(span.begin, span.end) for kind, span in times.items()}
