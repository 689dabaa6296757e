"""Memory and lanes of a report as a figure of matplotlib, the optional extra `plot`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ssd_fx.report.course import Course, course
from ssd_fx.report.model import Report, Span

_MIB = 1 << 20
_LANES = (("waits", "tab:red"), ("writes", "tab:green"), ("reads", "tab:purple"))


def picture(report: Report) -> Any:
    """The figure.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("Report.plot needs matplotlib; right would be pip install 'ssd_fx[plot]'") from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    found = course(report)
    _memory(memory, report, found)
    _lanes(lanes, report, found)
    return figure


def _memory(axes: Any, report: Report, found: Course) -> None:
    for name, points, style in (
        ("without ssd_fx", found.stock.points, "--"),
        ("with, predicted", found.own.points, "-"),
        ("with, measured", report.step.memory if report.step else (), "-"),
    ):
        if points:
            axes.step([1e3 * at for at, _ in points], [n / _MIB for _, n in points], style, where="post", label=name)
    axes.axhline(found.floor_bytes / _MIB, color="grey", linestyle=":", label="floor")
    axes.set(ylabel="MiB above the level before the step", ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _lanes(axes: Any, report: Report, found: Course) -> None:
    """Predicted lanes above measured ones."""
    rows: list[tuple[str, Sequence[Span], str]] = []
    bars = found.bars
    predicted = {
        "waits": [span for bar in bars for span in bar.times.waits],
        "writes": _there(bar.times.write for bar in bars),
        "reads": _there(bar.times.read for bar in bars),
    }
    rows += [(f"{name}, predicted", predicted[name], color) for name, color in _LANES]
    if report.step:
        of = {
            "waits": report.step.waits,
            "writes": report.step.transfers("write"),
            "reads": report.step.transfers("read"),
        }
        rows += [(f"{name}, measured", [(e.started, e.ended) for e in of[name]], color) for name, color in _LANES]
    for i, (_, spans, color) in enumerate(rows):
        axes.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in spans], (i - 0.4, 0.8), color=color)
    axes.set(
        yticks=range(len(rows)), yticklabels=[name for name, _, _ in rows], xlabel="ms", ylim=(len(rows) - 0.5, -0.5)
    )


def _there(spans: Iterable[Span | None]) -> list[Span]:
    return [span for span in spans if span is not None]
