"""What a user would pick instead, at equal peak and at equal time."""

from __future__ import annotations

from statistics import median

import peak
import svg
from system import MIB

from paper import text
from paper.measure import Case, Result, Setup, measure_all
from paper.part import Part

KEEP = "Inductor"
BUDGETS = (0, 0.25, 0.5, 0.75, "auto")
DEEPSPEED = f"""\
DeepSpeed's activation checkpoints in CPU memory: {text.NOT_MEASURED}. On a CPU they are where they were, so its mode is
the checkpoint above."""
CHOSEN = """\
The last table names the best of five budgets, chosen by these very rounds. So its ratios are somewhat too good: by less
than the width of an interval. "No slower" asks that the whole interval is at most 1."""
HOOKS = """\
Hooks see what a compiled graph saves only when its forward has ended. So the modes with hooks compile every layer on
its own, as does "Inductor per layer". The tutorial's files stay in the page cache, which is memory that these columns
do not count. SSDTrain's method is ours to write, from its text: one thread writes each tensor into the page cache and
waits until the drive has it, another one reads. What waits for the writing thread is its resident peak."""
TUTORIAL, SSDTRAIN, JEMALLOC = "tutorial's hooks to disk", "SSDTrain's method", "Inductor, jemalloc"


def _cases(setup: Setup) -> dict[str, Case]:
    width, layers = setup.shapes[0]
    model = setup.model("gpt", width, layers)
    tasks = {KEEP: setup.plain(model), "checkpoint": setup.plain(model, "checkpoint")}
    if setup.jemalloc:
        tasks[JEMALLOC] = setup.plain(model, preload=setup.jemalloc)
    tasks |= {"Inductor per layer": setup.plain(model, "layers")}
    tasks |= {TUTORIAL: setup.plain(model, "disk_hooks"), SSDTRAIN: setup.plain(model, "ssdtrain")}
    tasks |= {_ours(b): setup.ours(model, b) for b in BUDGETS}
    if setup.quick:
        tasks = {name: tasks[name] for name in (KEEP, TUTORIAL, SSDTRAIN, _ours(0))}
    return {f"GPT, width {width}, {layers} layers": tasks}


def _ours(budget: object) -> str:
    return f"ssd_fx, budget {budget}"


def compared(case: Result) -> list[tuple[str, str, str]]:
    """For every other mode: the fastest of ours that needs no more memory, and the smallest that is no slower.

    No slower is a budget whose whole interval is at most 1.
    """
    modes, rows = case["modes"], []
    ours = {name: mode for name, mode in modes.items() if name.startswith("ssd_fx")}
    for name, rival in modes.items():
        if name in ours:
            continue
        ratios = {own: text.Ratio.of(mode, rival) for own, mode in ours.items()}
        small = [own for own, mode in ours.items() if mode["peak_bytes"] <= rival["peak_bytes"]]
        fast = [own for own, ratio in ratios.items() if ratio.high <= 1]
        time = best = "none of ours"
        if small:
            own = min(small, key=lambda each: ratios[each].median)
            time = f"{own}: {ratios[own]}"
        if fast:
            own = min(fast, key=lambda each: ours[each]["peak_bytes"])
            best = f"{own}: {text.change(ours[own]['peak_bytes'], rival['peak_bytes'])}"
        rows.append((name, time, best))
    return rows


def _section(result: Result) -> str:
    parts = [text.cases(result)]
    for case in result["cases"].values():
        head = ("instead", "time of ours at its peak or below", "peak of ours at its time or below")
        parts += [text.table(head, compared(case)), CHOSEN]
        if JEMALLOC not in case["modes"]:
            parts.append(f"{JEMALLOC}: {text.NOT_MEASURED} (`--jemalloc LIB.so`).")
        else:
            parts.append(f"{JEMALLOC}: with PyTorch's own settings for it, `MALLOC_CONF={peak.JEMALLOC_CONF}`.")
    return "\n\n".join([*parts, DEEPSPEED, HOOKS, *text.missing(result)])


def _plot(result: Result) -> str:
    (case,) = result["cases"].values()
    keep = case["modes"][KEEP]
    series = {name: [text.points(mode, keep, mode["peak_bytes"] / MIB)] for name, mode in case["modes"].items()}
    ours = [name for name in series if name.startswith("ssd_fx")]
    line = sorted((series.pop(name)[0] for name in ours), key=lambda point: point.x)
    shown = {"ssd_fx": line} | {name: points for name, points in series.items() if points[0].y < 5}
    seconds = median(keep["time_s"])
    return svg.plot(shown, title=f"Inductor: {seconds:.2f} s", x="live peak, MiB", y="step time / Inductor's (95%)")


PART = Part(
    name="instead",
    title="What one would pick instead",
    share=0.12,
    paper="The paper compares with keeping and with full recomputation.",
    not_shown="SSDTrain's method is written from its text, for a CPU, through the page cache, without their direct "
    "storage of a GPU.",
    measure=lambda setup: measure_all(setup, _cases(setup)),
    section=_section,
    plot=_plot,
)
