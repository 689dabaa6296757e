"""How cost grows with layers, sequence, batch and the number of alias groups."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import svg
from svg import Point
from training import Task

from paper import text
from paper.measure import Case, Result, Setup, measure_all
from paper.part import Part

KEEP, OURS = "Inductor", "ssd_fx"
WIDTH, LAYERS, SEQ, BATCH = 128, 6, 256, 8  # of what does not grow


def _cases(setup: Setup) -> dict[str, Case]:
    layers, seqs, batches = ((2, 48, 12, 24), (256, 4096, 1024), (1, 64, 8))
    if setup.quick:
        layers, seqs, batches = ((2, 4), (256,), (1,))  # type: ignore[assignment]
    sizes = {f"layers {n}": (n, SEQ, BATCH) for n in layers}
    sizes |= {f"sequence {n}": (LAYERS, n, max(1, BATCH * SEQ // n)) for n in seqs if not setup.quick}
    sizes |= {f"batch {n}": (LAYERS, SEQ, n) for n in batches if not setup.quick}
    found = {label: _pair(setup, *size) for label, size in sizes.items()}
    few = _pair(setup, LAYERS, SEQ, BATCH)
    return found | {"groups of 2 MiB and more": {**few, OURS: _large_groups(few)}}


def _pair(setup: Setup, layers: int, seq: int, batch: int) -> Case:
    model = replace(setup.model("gpt", WIDTH, layers, batch), seq=seq)
    return {KEEP: setup.plain(model, without="caches"), OURS: setup.ours(model, without="caches", min_bytes=1)}


def _large_groups(case: Case) -> Task:
    return replace(case[OURS], options={**case[OURS].options, "min_bytes": 2 << 20})


def _section(result: Result) -> str:
    rows = []
    for label, case in result["cases"].items():
        if {KEEP, OURS} <= set(case["modes"]):
            keep, ours = case["modes"][KEEP], case["modes"][OURS]
            nodes = ours["stores"] + ours["loads"]
            cpu = median(a - b for a, b in zip(ours["cpu_s"], keep["cpu_s"], strict=True))
            cells = [
                str(text.Ratio.of(ours, keep)),
                f"{ours['first_s'] - keep['first_s']:.1f} of {ours['first_s']:.1f}",
            ]
            each = f"{1e6 * cpu / nodes:.0f}" if nodes else ""
            memory = f"{text.mib(keep['resident_peak_bytes'])}, {text.mib(ours['resident_peak_bytes'])}"
            rows.append([label, *cells, f"{nodes / 2:.0f}", each, memory, str(case["rounds"])])
    resident = "resident, MiB: Inductor, ssd_fx"
    head = ("", "time to Inductor", "first step longer by, s", "stored", "µs a node", resident, "rounds")
    fixed = f"GPT of width {WIDTH}; where nothing else is said {LAYERS} layers, sequence {SEQ}, batch {BATCH}."
    cost = "µs a node: CPU time beyond Inductor's per store and per load, copies, checksums and I/O included."
    cost += f' "sequence {SEQ}" and "batch {BATCH}" are one case, measured twice: so far apart are such figures.'
    cost += " `benchmarks/compile_time.py` has the seconds of every pass."
    return "\n\n".join([text.table(head, rows), f"{fixed} {cost}", *text.missing(result)])


def _plot(result: Result) -> str:
    points = []
    for label, case in result["cases"].items():
        if label.startswith("layers") and {KEEP, OURS} <= set(case["modes"]):
            points.append(text.points(case["modes"][OURS], case["modes"][KEEP], float(label.split()[1])))
    line: list[Point] = sorted(points, key=lambda point: point.x)
    return svg.plot({OURS: line}, title="Layers", x="layers", y="step time / Inductor's (95%)")


PART = Part(
    name="growth",
    title="Growth",
    share=0.05,
    paper="The paper projects to larger models by formulas of its own; ours are in docs/projection.md.",
    not_shown="The width is small, so that many layers fit: the overhead of nodes is larger here than in a real model.",
    measure=lambda setup: measure_all(setup, _cases(setup)),
    section=_section,
    plot=_plot,
)
