"""The size of the micro-batch (the paper's figure 8a): tokens a second of a step of equally many samples."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import svg
from svg import Point

from paper import text
from paper.measure import Case, Result, Setup, measure_all
from paper.part import Part

KEEP = "Inductor"
GAIN = """\
The gain is that of a step after every micro-batch, as in the figure: the time of its graphs and of one step of the
optimizer, both measured here. It is relative to the same mode at 1. Tokens a second are of the step with all samples.
"ssd_fx" is at budget 0."""


def _cases(setup: Setup) -> dict[str, Case]:
    """All sizes of a mode in one case, so that they are compared in turns."""
    samples = 4 if setup.quick else 32
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= samples][:: 2 if setup.quick else 1]
    width, layers = setup.shapes[0]
    found: dict[str, Case] = {}
    for optimizer, name in (("sgd", "SGD"), ("adamw", "AdamW"))[: 1 if setup.quick else 2]:
        tasks = {}
        for size in sizes:
            model = setup.model("gpt", width, layers, size)
            more: dict[str, Any] = {"micro": samples // size, "optimizer": optimizer}
            tasks[f"{KEEP} {size}"] = replace(setup.plain(model), **more)
            tasks[f"ssd_fx {size}"] = replace(setup.ours(model), **more)
        found[f"GPT, width {width}, {layers} layers, {samples} samples a step, {name}"] = tasks
    return found


def _section(result: Result) -> str:
    parts = []
    for label, case in result["cases"].items():
        head = ("mode, micro-batch", "tokens/s", "gain over its own 1", "of it the optimizer's", "live peak, MiB")
        parts.append(f"**{label}**; {text.rounds(case)}.\n\n{text.table(head, _rows(case))}")
    return "\n\n".join([*parts, GAIN, *text.missing(result)])


def _rows(case: Result) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, mode in case["modes"].items():
        first = case["modes"].get(f"{name.split()[0]} 1")
        gain, share = ("", "") if first is None else gains(mode, first, int(name.split()[1]))
        speed = mode["tokens"] / median(mode["time_s"])
        rows.append((name, f"{speed:.0f}", gain, share, text.mib(mode["peak_bytes"])))
    return rows


def gains(mode: Result, first: Result, size: int) -> tuple[str, str]:
    """How much faster a sample is than in micro-batches of 1, and which share of the time saved is the optimizer's.

    A step after each micro-batch of `size` takes graphs / (samples / size) + optimizer.
    """
    graphs, ones = median(mode["graph_s"]), median(first["graph_s"])
    optimizer = median(t - g for t, g in zip(first["time_s"], first["graph_s"], strict=True))
    samples = first["micro"]
    before, now = ones / samples + optimizer, graphs / samples + optimizer / size
    saved = before - now
    share = f"{(optimizer - optimizer / size) / saved:.0%}" if saved > 0 and size > 1 else ""
    return f"{before / now:.2f}", share


def _plot(result: Result) -> str:
    series: dict[str, list[Point]] = {}
    for label, case in result["cases"].items():
        for name, mode in case["modes"].items():
            speeds = [mode["tokens"] / seconds for seconds in mode["time_s"]]
            way, size = name.split()
            series.setdefault(f"{way}, {label.split()[-1]}", []).append(
                Point(int(size), median(speeds), min(speeds), max(speeds))
            )
    return svg.plot(series, title="Tokens a second (bars: extremes)", x="micro-batch", y="tokens/s")


PART = Part(
    name="micro",
    title="Size of the micro-batch",
    share=0.1,
    paper="Figure 8a: throughput rises with the batch, and most of the gain is the weight update.",
    not_shown="Products of matrices are already large enough for two cores at a micro-batch of 1, unlike on a GPU.",
    measure=lambda setup: measure_all(setup, _cases(setup)),
    section=_section,
    plot=_plot,
)
