"""A projection as text: one row for each thing that one wants to know."""

from __future__ import annotations

import math

from projection.formulas import (
    LAYERS_IN_MEMORY,
    PAPER_RETENTION,
    PAPER_WAF,
    Endurance,
    Projection,
    StepIO,
    drives_bytes,
)
from ssd_fx.hardware import Drives
from ssd_fx.report.rows import aligned
from ssd_fx.runtime.wear import digits, format_days
from ssd_fx.sizes import format_bytes, format_seconds

Rows = list[tuple[str, str]]


def of_scenario(found: Projection) -> str:
    """The text of a projection."""
    scenario = found.scenario
    rows = [*_inputs(found), ("drives", _drives(scenario.drives)), *_activations(found)]
    rows += [*_rates(found.traffic, scenario.drives), *_memory(found), _recomputed(found)]
    rows += _life(found.endurance, scenario.drives, found.share)
    return "\n".join(aligned([*rows, *_cost(found)]))


def _inputs(found: Projection) -> Rows:
    scenario = found.scenario
    model, split = scenario.model, scenario.parallelism
    size = f"{found.parameters / 1e9:.4g} B parameters, {model.layers} layers, width {model.width}, {model.heads} heads"
    extra = [f"{model.kv_heads} of them for keys and values"] if model.kv_heads else []
    extra += ["gated MLP"] if model.gated else []
    rate = f"{scenario.tflops:.4g} TFLOP/s ({scenario.tflops_source})"
    parallel = f"TP {split.tp}, PP {split.pp}, DP {split.dp}"
    parallel += ", sequence parallel" if split.sp else ""
    parallel += f", ZeRO {split.zero}" if split.zero else ""
    return [
        ("model", ", ".join([size, *extra, f"sequence {model.sequence}, {model.dtype}"])),
        ("GPU", f"{scenario.device.name} at {rate}; {parallel}; micro-batch {scenario.batch}"),
    ]


def _drives(drives: Drives) -> str:
    rates = f"{digits(drives.write_bytes_s / 1e9)} GB/s written, {digits(drives.read_bytes_s / 1e9)} read"
    each = f"{digits(drives_bytes(drives) / 1e12, 4)} TB, {rates}, {digits(drives.rated_tb, 6)} TB rated"
    return f"{drives.count:g} x {drives.drive.name} per GPU: {each}; the link has {drives.link_gbps:g} GB/s each way"


def _activations(found: Projection) -> Rows:
    layers = found.scenario.layers_per_gpu
    each = f"{format_bytes(found.layer_bytes)} ({found.layer_bytes_per_sbh:.3g} bytes per s*b*h)"
    rows = [("per layer", each)]
    if found.outside_bytes:
        rows.append(("outside", f"{format_bytes(found.outside_bytes)}: last norm, head, logits"))
    total = f"{format_bytes(found.traffic.nbytes)} written for a micro-batch, {layers} layers"
    return [*rows, ("per GPU", total + (" and the head" if found.outside_bytes else ""))]


def _rates(traffic: StepIO, drives: Drives) -> Rows:
    times = f"forward {format_seconds(traffic.forward_s)}, forward and backward {format_seconds(traffic.step_s)}"
    half, forward = digits(traffic.write_bytes_s / 1e9), digits(traffic.forward_write_bytes_s / 1e9)
    needed = "{} per GPU within half the step, {} within the forward".format(*traffic.drives_needed(drives.drive))
    return [
        ("time", times),
        (
            "write rate",
            f"{half} GB/s within half the step (the paper's measure), {forward} within the forward",
        ),
        ("read rate", f"{digits(traffic.read_bytes_s / 1e9)} GB/s within the backward"),
        ("needed", f"{needed}, of these drives"),
        ("verdict", _verdict(traffic, drives)),
        ("", "not checked: what else uses the link, reads beside writes, and rates that fall when a drive is full"),
    ]


def _verdict(traffic: StepIO, drives: Drives) -> str:
    share = traffic.share(drives)
    if share < 1:
        write, read = drives.write_bytes_s, drives.read_bytes_s
        limit = min((write / traffic.write_bytes_s, write), (read / traffic.read_bytes_s, read))[1]
        slow = "drives are" if limit < drives.link_gbps * 1e9 else "link is"
        return f"the {slow} too slow for more than {_percent(share):g}% of the activations; the rest must stay"
    if traffic.hides(drives) == "forward":
        return "the writes hide behind the forward"
    return "the writes hide within half the step, but not behind the forward alone"


def _memory(found: Projection) -> Rows:
    memory, room = found.memory, found.scenario.device.memory_gib * 2**30
    optimizer = {"sgd": "SGD", "adam": "Adam"}[found.scenario.optimizer]
    state = f"{format_bytes(memory.state_bytes)} of {format_bytes(room)} for weights, gradients and {optimizer}"
    kept, offloaded = memory.largest_batch_kept, memory.largest_batch_offloaded
    space = f"{LAYERS_IN_MEMORY} layers in memory, {digits(memory.largest_drive_bytes / 1e12)} TB on the drives"
    space += ", which have room for no more" if memory.drives_are_full else ""
    space += f", {100 - _percent(found.share):.3g}% of the activations kept" if found.share < 1 else ""
    peak = f"{format_bytes(memory.kept_bytes)} all kept, {format_bytes(memory.offloaded_bytes)} offloaded"
    peak += f", of a micro-batch of {found.scenario.batch}"
    if memory.state_bytes > room:
        state += ": too much; right would be a larger --tp, --pp or --zero"
    largest = f"at most {offloaded} offloaded ({space}), {kept} with all kept"
    if not offloaded:
        largest = "not even 1 fits" + (" on the drives" if memory.drives_are_full else "")
    return [("memory", state), ("peak", peak), ("micro-batch", largest)]


def _recomputed(found: Projection) -> tuple[str, str]:
    """What a checkpoint around every layer would take instead of drives."""
    memory, longer = found.memory, found.recomputed_step_s / found.traffic.step_s - 1
    took = f"{format_seconds(found.recomputed_step_s)} for forward and backward (+{longer:.0%})"
    fits = f"peak {format_bytes(memory.recomputed_bytes)}, micro-batch at most {memory.largest_batch_recomputed}"
    return "recompute", f"instead, with a checkpoint around every layer: {took}, {fits}"


def _life(life: Endurance, drives: Drives, share: float) -> Rows:
    waf, retention = format_days(life.paper_waf_days), format_days(life.paper_days)
    written = f"{digits(life.bytes_per_day / 1e12, 4)} TB per GPU and day, if it trains day and night"
    return [
        ("written", f"{written}; {_percent(share):g}% of the activations" if share < 1 else written),
        ("drive life", f"{format_days(life.rated_days)} by rated TBW ({drives.count:g} x {drives.drive.tbw:g} TB)"),
        ("", f"{waf} with WAF {PAPER_WAF:g}, {retention} with retention {PAPER_RETENTION:g} too:"),
        ("", "these are the reference paper's assumptions, which no vendor guarantees"),
    ]


def _cost(found: Projection) -> Rows:
    scenario, life = found.scenario, found.endurance
    if not life.drives_usd:
        return [("cost", "not known; --price is US dollars for one drive")]
    share = f", {life.drives_usd / scenario.device_usd:.1%} of what that costs" if scenario.device_usd else ""
    count = scenario.parallelism.gpus
    gpus = f"{count} GPU{'s' if count > 1 else ''}"
    own = f"{_dollars(life.drives_usd)} of drives per GPU{share}; {_dollars(count * life.drives_usd)} for {gpus}"
    return [("cost", f"{own}; wear by rated TBW {_dollars(life.wear_usd_per_day)} per GPU and day")]


def _percent(share: float) -> float:
    """Rounded down, so that a part is never all."""
    return math.floor(1000 * share) / 10


def _dollars(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 10 else f"${amount:.2f}"
