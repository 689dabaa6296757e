"""Memory and lanes of a report as a figure of matplotlib, the optional extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd_fx.report.model import Facts
from ssd_fx.report.page import data

_MIB = 1 << 20
_LANES = (("waits", "tab:red"), ("writes", "tab:green"), ("reads", "tab:purple"))


def picture(known: Facts) -> Any:
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
    shown = data(known)
    _memory(memory, shown)
    _lanes(lanes, shown)
    return figure


def _memory(axes: Any, shown: Mapping[str, Any]) -> None:
    """`shown`: as `page.data` makes it."""
    for name, step, style in (
        ("without ssd_fx", shown["stock"], "--"),
        ("with, predicted", shown["own"], "-"),
        ("with, measured", shown["measured"], "-"),
    ):
        if step and step["points"]:
            at, nbytes = zip(*step["points"], strict=True)
            axes.step(at, [n / _MIB for n in nbytes], style, where="post", label=name)
    axes.axhline(shown["floor"] / _MIB, color="grey", linestyle=":", label="floor")
    axes.set(ylabel="MiB above the level before the step", ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _lanes(axes: Any, shown: Mapping[str, Any]) -> None:
    """Predicted lanes above measured ones."""
    kinds = {"predicted": shown["own"], "measured": shown["measured"]}
    rows = [(f"{name}, {kind}", found[name], color) for kind, found in kinds.items() if found for name, color in _LANES]
    for i, (_, spans, color) in enumerate(rows):
        axes.broken_barh([(begin, end - begin) for begin, end in spans], (i - 0.4, 0.8), color=color)
    names = [name for name, _, _ in rows]
    axes.set(yticks=range(len(rows)), yticklabels=names, xlabel="ms", ylim=(len(rows) - 0.5, -0.5))
