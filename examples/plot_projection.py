"""Draw a projection of `ssd-fx project`: rates, memory, life of the drives. It needs matplotlib, the extra `plot`.

python examples/plot_projection.py projection.png --model megatron-145b --drives 4
python examples/plot_projection.py projection.png --of plan/*.plan.json --step-ms 350
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from ssd_fx import cli
from ssd_fx.projection import command
from ssd_fx.projection.compiled import Compiled
from ssd_fx.projection.formulas import Projection, StepIO, endurance, kept_bytes, offloaded_bytes
from ssd_fx.projection.scenario import Drives

_POINTS = 60
Draw = Callable[[Any], None]  # on matplotlib's Axes


def main(words: Sequence[str]) -> None:
    """Draw the projection that the words after the file's name ask `ssd-fx project` for."""
    path, *asked = words
    flags = cli.parser().parse_args(["project", *asked])
    save(path, of_plans(*command.compiled(flags)) if flags.of else of_scenario(command.projected(flags)))


def of_scenario(found: Projection) -> list[Draw]:
    """Write rates over achieved FLOP/s, memory over micro-batches, life over drives."""
    drives, traffic = found.scenario.drives, found.traffic
    return [
        lambda axes: _rates_over_flops(axes, found),
        lambda axes: _memory(axes, found),
        lambda axes: _life(axes, traffic, drives),
    ]


def of_plans(found: Compiled, drives: Drives) -> list[Draw]:
    """What is known of a compiled model: write rates over the time of a step, life over drives."""
    traffic = found.traffic
    return [lambda axes: _rates_over_steps(axes, traffic, drives), lambda axes: _life(axes, traffic, drives)]


def save(path: str, panels: Sequence[Draw]) -> None:
    """Draw the panels side by side, into a file of a kind that matplotlib writes."""
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw(axes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _rates_over_flops(axes: Any, found: Projection) -> None:
    achieved = found.scenario.tflops
    top = max(found.scenario.device.peak_tflops, achieved)
    rates = [top * i / _POINTS for i in range(1, _POINTS + 1)]
    _rates(axes, rates, [achieved / rate for rate in rates], found.traffic, found.scenario.drives)
    axes.axvline(achieved, color="grey", linestyle=":", label=f"achieved: {achieved:.4g}")
    axes.set(ylim=(0, None), xlabel="TFLOP/s achieved by one GPU", title="Rate that hides the writes")


def _rates_over_steps(axes: Any, traffic: StepIO, drives: Drives) -> None:
    slower = [0.25 * 2 ** (4 * i / _POINTS) for i in range(_POINTS + 1)]
    _rates(axes, [traffic.step_s * s for s in slower], slower, traffic, drives)
    axes.axvline(traffic.step_s, color="grey", linestyle=":", label=f"this step: {traffic.step_s:.3g} s")
    axes.set(yscale="log", xlabel="seconds of forward and backward", title="Rate that hides the writes")


def _rates(axes: Any, xs: Sequence[float], slower: Sequence[float], traffic: StepIO, drives: Drives) -> None:
    """slower: by which the step takes longer at each of `xs`."""
    half, forward = traffic.write_bytes_s / 1e9, traffic.forward_write_bytes_s / 1e9
    axes.plot(xs, [forward / s for s in slower], label="within the forward")
    axes.plot(xs, [half / s for s in slower], label="within half the step (paper)")
    written = drives.write_bytes_s / 1e9
    axes.axhline(written, color="black", linestyle="--", label=f"{drives.count:g} drives: {written:.3g}")
    axes.set(ylabel="GB/s per GPU", xlim=(min(xs) if min(xs) > 1 else 0, max(xs)))


def _memory(axes: Any, found: Projection) -> None:
    scenario, memory = found.scenario, found.memory
    room, state = scenario.device.memory_gib, memory.state_bytes / 2**30
    last = max(memory.largest_batch_offloaded, 2 * scenario.batch, 4)
    batches = [last * i / _POINTS for i in range(_POINTS + 1)]
    kept, offloaded = kept_bytes(scenario, 1), offloaded_bytes(scenario, 1, found.share)
    for name, nbytes in (("all kept", kept), ("offloaded", offloaded)):
        each = nbytes / 2**30
        axes.plot(batches, [state + each * b for b in batches], label=name)
    axes.axhline(room, color="black", linestyle="--", label=f"{scenario.device.name}: {room:g} GiB")
    axes.axvline(scenario.batch, color="grey", linestyle=":", label=f"micro-batch {scenario.batch}")
    axes.set(xlabel="micro-batch", ylabel="GiB per GPU", title="State and activations")
    axes.set(ylim=(0, 1.4 * max(room, state)), xlim=(0, last))


def _life(axes: Any, traffic: StepIO, drives: Drives) -> None:
    counts = range(1, max(8, math.ceil(2 * drives.count)) + 1)
    lives = [endurance(traffic, replace(drives, count=n)) for n in counts]
    axes.plot(counts, [life.rated_days for life in lives], marker="o", label="rated TBW")
    paper = [life.paper_days for life in lives]
    axes.plot(counts, paper, marker="o", linestyle="--", label="with the paper's assumptions")
    axes.axhline(365, color="black", linewidth=0.8, linestyle="--", label="one year")
    axes.axvline(drives.count, color="grey", linestyle=":", label=f"{drives.count:g} drives")
    axes.set(xlabel=f"drives per GPU ({drives.drive.name})", ylabel="days", yscale="log", title="Life of the drives")


if __name__ == "__main__":
    main(sys.argv[1:])
