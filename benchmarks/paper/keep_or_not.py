"""The recompute-offload-keep curve (the paper's figure 7): throughput of model FLOPs against peak, over batches."""

from __future__ import annotations

from statistics import median
from typing import Any

import svg
from svg import Point
from system import MIB

from paper import text
from paper.measure import Case, Result, Setup, measure_all
from paper.part import Part

LAYERS = 3
KEEP, OFFLOAD, JOINT = "keep", "offload", "joint"
SAME = """\
"joint" may recompute as well, and in none of these cases its plan did. So both names measure the same, and their
difference is noise."""
SHARES = (0.5,)  # of PyTorch's activation_memory_budget


def _cases(setup: Setup) -> dict[str, Case]:
    widths, batches = ((64,), (2, 4)) if setup.quick else ((768, 896), (8, 4, 16, 32))
    if setup.device != "cpu":
        widths = (12288, 14336)
    return {f"width {w}, batch {b}": _modes(setup, w, b) for w in widths for b in batches}


def _modes(setup: Setup, width: int, batch: int) -> Case:
    model = setup.model("bert", width, LAYERS, batch)
    tasks = {KEEP: setup.plain(model), "checkpoint": setup.plain(model, "checkpoint")}
    tasks |= {f"recompute {share:g}": setup.plain(model, "recompute", budget=share) for share in SHARES}
    if setup.quick:
        return {KEEP: tasks[KEEP], OFFLOAD: setup.ours(model, recompute=False)}
    tasks |= {OFFLOAD: setup.ours(model, recompute=False), JOINT: setup.ours(model)}
    return tasks


def _flops(setup: Setup, width: int, batch: int) -> float:
    """Of forward and backward; what is recomputed does not count. docs/projection.md, "2. Time", has the formulas."""
    tokens = setup.seq * batch
    layer = 24 * tokens * width**2 + 4 * tokens * setup.seq * width
    return 3.0 * (LAYERS * layer + 2 * tokens * width * setup.vocabulary)


def _measure(setup: Setup) -> Result:
    found = measure_all(setup, _cases(setup))
    for label, case in found["cases"].items():
        width, batch = _sizes(label)
        case["flops"] = _flops(setup, width, batch)
    return found


def _sizes(label: str) -> tuple[int, int]:
    width, batch = (int(part.split()[1]) for part in label.split(", "))
    return width, batch


def doubles(result: Result) -> list[tuple[str, str, float, float]]:
    """(offload at 2b, keep at b, their peaks) for all pairs that were measured."""
    found = []
    for label, case in result["cases"].items():
        width, batch = _sizes(label)
        double = f"width {width}, batch {2 * batch}"
        twice: Any = result["cases"].get(double)
        if twice and OFFLOAD in twice["modes"] and KEEP in case["modes"]:
            peaks = twice["modes"][OFFLOAD]["peak_bytes"], case["modes"][KEEP]["peak_bytes"]
            found.append((double, label, *peaks))
    return found


def _section(result: Result) -> str:
    rows = [
        (f"offload, {double}", f"keep, {label}", text.mib(ours), text.mib(keep), "yes" if ours <= keep else "NO")
        for double, label, ours, keep in doubles(result)
    ]
    asserted = text.table(("offload at twice the batch", "keep", "MiB", "MiB", "needs no more"), rows)
    head = ("", "mode", "GFLOP/s", "time to keep", "live peak, MiB", "rounds")
    speeds = []
    for label, case in result["cases"].items():
        for name, mode in case["modes"].items():
            speed = case["flops"] / median(mode["time_s"]) / 1e9
            ratio = str(text.Ratio.of(mode, case["modes"][KEEP]))
            speeds.append((label, name, f"{speed:.1f}", ratio, text.mib(mode["peak_bytes"]), str(case["rounds"])))
    same = all(_is_same(case) for case in result["cases"].values())
    return "\n\n".join([asserted, text.table(head, speeds), *[SAME][:same], *text.missing(result)])


def _is_same(case: Result) -> bool:
    """Whether "joint" does what "offload" does."""
    of = [case["modes"].get(name, {}) for name in (OFFLOAD, JOINT)]
    return all(of) and all(of[0][name] == of[1][name] for name in ("peak_bytes", "written_bytes", "stores"))


def _plot(result: Result) -> str:
    """Throughput to that of keep in the same case, because cases may be of several machines."""
    series: dict[str, list[Point]] = {}
    for case in result["cases"].values():
        for name, mode in case["modes"].items():
            faster = text.points(case["modes"][KEEP], mode, mode["peak_bytes"] / MIB)
            series.setdefault(name, []).append(faster)
    ordered = {name: sorted(points, key=lambda point: point.x) for name, points in series.items()}
    return svg.plot(ordered, title="BERT of 3 layers, batch 4 to 32", x="live peak, MiB", y="throughput / keep's (95%)")


PART = Part(
    name="curve",
    title="Keep, recompute or offload",
    share=0.16,
    paper="Figure 7: the throughput is that of keeping, the peak is below that of recomputing, and in equal memory "
    "the batch doubles.",
    not_shown="Batches are small because the machine is; at larger ones transfers and compute grow alike.",
    measure=_measure,
    section=_section,
    plot=_plot,
)
