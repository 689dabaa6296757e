"""What gpu.py measured, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

MIB = 2**20
COLUMNS = (
    "engine, step ms, plain ms, ratio of pairs, peak MiB, plain MiB, stall ms, saved MiB, written, read, given back"
)


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [f"# {result['system']['device']}, {result['date']}", "", "Written by benchmarks/gpu.py (`make gpu`).", ""]
    lines += [f"- {name}: {text}" for name, text in result["system"].items()]
    lines += [f"- engine {name}: {text}" for name, text in result["serving"].items()]
    lines += [f"- engine {name}: not here: {text}" for name, text in result["missing"].items()]
    if result["bandwidth"]:
        lines += ["", "## Device memory to and from the engine, MB/s: median (slowest to fastest)", ""]
        lines += ["| engine | MiB | write | read | CPU s per GB |", "|---|---|---|---|---|"]
        lines += [bandwidth_row(row) for row in result["bandwidth"]]
    if result["steps"]:
        columns = COLUMNS.split(", ")
        lines += ["", "## A training step beside plain Inductor: medians, peaks the highest", ""]
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += [step_row(engine, found["pairs"]) for engine, found in result["steps"].items()]
    for engine, found in result["steps"].items():
        lines += kernel_lines(engine, found.get("kernels")) + predicted_lines(engine, found)
    return "\n".join(lines) + "\n"


def bandwidth_row(row: dict[str, Any]) -> str:
    write, read = ("{:.0f} ({:.0f} to {:.0f})".format(*row[name]) for name in ("write", "read"))
    cpu = "-" if row["cpu_s_per_gb"] is None else f"{row['cpu_s_per_gb']:.2f}"
    return f"| {row['engine']} | {row['size_mib']} | {write} | {read} | {cpu} |"


def middle(steps: Sequence[dict[str, Any]], name: str, scale: float) -> str:
    return f"{statistics.median(step[name] for step in steps) * scale:.1f}"


def step_row(engine: str, taken: Sequence[Sequence[dict[str, Any]]]) -> str:
    plain, ours = ([pair[which] for pair in taken] for which in (0, 1))
    ratios = sorted(b["time_s"] / a["time_s"] for a, b in taken)
    cells = [engine, middle(ours, "time_s", 1e3), middle(plain, "time_s", 1e3)]
    cells += [f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"]
    cells += [f"{max(step['peak_bytes'] for step in steps) / MIB:.1f}" for steps in (ours, plain)]
    cells += [middle(ours, "stall_s", 1e3)]
    cells += [middle(ours, f"{name}_bytes", 1 / MIB) for name in ("saved", "written", "read", "forwarded")]
    return "| " + " | ".join(cells) + " |"


def kernel_lines(engine: str, found: dict[str, Any] | None) -> list[str]:
    """How long the kernels of one step took on the device, and the largest of them."""
    if not found:
        return []
    lines = ["", f"## Kernels of one step on the device, engine {engine}", ""]
    lines += ["| | kernels | ms | copies, ms |", "|---|---|---|---|"]
    lines += [f"| {who} | {k['count']} | {k['ms']:.2f} | {k['copies_ms']:.2f} |" for who, k in found.items()]
    for who, k in found.items():
        lines += ["", f"{who}, the largest, ms:", *(f"- {name}: {ms:.3f}" for name, ms in k["largest"].items())]
    return lines


def predicted_lines(engine: str, found: dict[str, Any]) -> list[str]:
    """The plan's figures of forward and backward beside the measured ones."""
    plan = found.get("predicted")
    if plan is None:
        return []
    plain, ours = ([pair[which] for pair in found["pairs"]] for which in (0, 1))
    rows = [
        ("compute, ms", plan["compute_s"] * 1e3, middle(plain, "graph_s", 1e3)),
        ("stall, ms", (plan["write_stall_s"] + plan["read_stall_s"]) * 1e3, middle(ours, "stall_s", 1e3)),
        ("forward and backward, ms", plan["step_s"] * 1e3, middle(ours, "graph_s", 1e3)),
        ("peak, MiB", plan["peak_bytes"] / MIB, f"{max(step['peak_bytes'] for step in ours) / MIB:.1f}"),
        ("peak with all kept, MiB", plan["kept_peak_bytes"] / MIB, f"{max(s['peak_bytes'] for s in plain) / MIB:.1f}"),
        ("floor, MiB", plan["floor_bytes"] / MIB, "-"),
    ]
    lines = ["", f"## Predicted and measured, engine {engine}", "", "| | predicted | measured |", "|---|---|---|"]
    return lines + [f"| {name} | {said:.1f} | {measured} |" for name, said, measured in rows]
