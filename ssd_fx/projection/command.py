"""The command `ssd-fx project`: flags, presets, and what goes where."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from ssd_fx.projection import compiled, plot, text
from ssd_fx.projection.checks import positive
from ssd_fx.projection.endurance import endurance
from ssd_fx.projection.presets import DEFAULT_MACHINE, DRIVES, MACHINES, RUNS, UTILISATION, Machine, Run
from ssd_fx.projection.project import project
from ssd_fx.projection.scenario import ELEMENT_BYTES, Device, Drives, Model, Parallelism, Scenario
from ssd_fx.projection.traffic import Traffic
from ssd_fx.refusal import refusing

_MODEL = {
    "layers": "layers",
    "width": "hidden size",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values (grouped-query attention); default: as many as heads",
    "ffn": "inner width of the MLP; default: four times the width",
    "sequence": "tokens of a sequence",
    "vocabulary": "tokens of the vocabulary",
}
_NEEDED = ("layers", "width", "heads", "sequence")
_PARALLELISM = {
    "tp": "GPUs that share a layer (tensor parallel)",
    "pp": "pipeline stages",
    "dp": "GPUs with a share of the batch (data parallel)",
}
_FLAGS = {
    "gated": "the MLP is gated",
    "dropout": "with dropout",
    "tied": "the head has the matrix of the embedding",
    "sp": "sequence parallel",
    "head": "count embedding, head and logits too; default: not for presets of papers, which leave them out",
}
_GPU = {
    "tflops": "TFLOP/s that one GPU achieves",
    "peak_tflops": "its peak, instead of --tflops",
    "utilisation": f"part of the peak that it achieves; default: {UTILISATION}",
    "memory_gib": "its memory",
}
_DRIVE = {
    "write_gbps": "10^9 bytes a second that one drive writes",
    "read_gbps": "10^9 bytes a second that one drive reads",
    "capacity_tb": "10^12 bytes that one drive holds",
    "tbw": "rated endurance of one drive, in 10^12 bytes",
}


_EXAMPLES = """examples:
  ssd-fx project --model megatron-18b
  ssd-fx project --of plan/*.plan.json --step-ms 350 --drives 1 --tbw 600

exit status: 0 fine; 2 wrong words or values.
"""


def _number(kind: type[int] | type[float]) -> Any:
    def parse(given: str) -> float:
        try:
            return kind(given)
        except ValueError:
            right = "a whole number such as 8" if kind is int else "a number such as 2.5"
            raise argparse.ArgumentTypeError(f"{given!r} is not possible; right would be {right}") from None

    return parse


def add(commands: Any) -> None:
    """Add the command to the subparsers of `ssd-fx`."""
    text_ = "project bytes, rates, life and cost of drives for a model, without running it"
    parser = commands.add_parser(
        "project",
        help=text_,
        description=f"{text_}; docs/projection.md has the formulas",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(parser.add_argument_group("model"))
    _add_device(parser.add_argument_group("GPU and drives"))
    out = parser.add_argument_group("output")
    plans = "plan.json files of a compiled model, instead of a model"
    out.add_argument("--of", nargs="+", metavar="PLAN", type=os.path.expanduser, help=plans)
    out.add_argument(
        "--runs",
        nargs="+",
        type=_number(int),
        metavar="N",
        help="with --of: how often a step runs the graphs, one number for all or one for each; default: once",
    )
    out.add_argument("--step-ms", type=_number(float), help="with --of: forward and backward, instead of as predicted")
    out.add_argument("--json", action="store_true", help="print JSON; rates are bytes a second")
    drawn = "draw it as well, e.g. projection.png (needs matplotlib)"
    out.add_argument("--plot", metavar="FILE", type=os.path.expanduser, help=drawn)
    parser.set_defaults(run=run)


def _add_model(group: Any) -> None:
    group.add_argument("--model", choices=RUNS, metavar="NAME", help=f"a preset: {', '.join(RUNS)}")
    _add_numbers(group, int, _MODEL | _PARALLELISM | {"batch": "micro-batch, in sequences; default: 1"})
    for name, meaning in _FLAGS.items():
        group.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=meaning)
    group.add_argument("--zero", type=_number(int), choices=range(4), metavar="N", help="stage of ZeRO, 0 to 3")
    group.add_argument("--dtype", choices=ELEMENT_BYTES, metavar="NAME", help="of activations: fp16, bf16 or fp32")
    group.add_argument("--attention", choices=("flash", "matrix"), metavar="NAME", help="flash or matrix")
    group.add_argument("--optimizer", choices=("adam", "sgd"), metavar="NAME", help="adam or sgd")


def _add_device(group: Any) -> None:
    presets = f"a preset: {', '.join(MACHINES)}; default: that of the model's preset, or {DEFAULT_MACHINE}"
    group.add_argument("--machine", choices=MACHINES, metavar="NAME", help=presets)
    _add_numbers(group, float, _GPU | _DRIVE)
    _add_numbers(group, float, {"drives": "drives per GPU; 0.5 for four drives of eight GPUs"})
    _add_numbers(group, float, {"link_gbps": "10^9 bytes a second each way between a GPU and its drives"})
    group.add_argument("--drive", choices=DRIVES, metavar="NAME", help=f"a preset: {', '.join(DRIVES)}")
    group.add_argument("--price", dest="price_usd", type=_number(float), metavar="X", help="US dollars for a drive")


def _add_numbers(group: Any, kind: type[int] | type[float], meanings: Mapping[str, str]) -> None:
    for name, meaning in meanings.items():
        metavar = "N" if kind is int else "X"
        group.add_argument(_flag(name), dest=name, type=_number(kind), metavar=metavar, help=meaning)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(flags: argparse.Namespace) -> int:
    """Print the projection, and return the exit status: 2 for a wrong value, which one line on stderr names."""
    with refusing(2):
        found = _of_plan(flags) if flags.of else _of_model(flags)
    print(found)
    return 0


def _of_plan(flags: argparse.Namespace) -> str:
    for name in ("model", "batch", "dtype", "attention", "optimizer", "zero", *_MODEL, *_PARALLELISM, *_FLAGS, *_GPU):
        if getattr(flags, name) is not None:
            raise ValueError(f"{_flag(name)}={getattr(flags, name)} is of a model; right would be without --of")
    if flags.step_ms is not None:
        positive("step_ms", flags.step_ms, "milliseconds")
    found = compiled.read(flags.of, flags.step_ms and flags.step_ms / 1e3, flags.runs or (1,))
    drives = _drives(flags, MACHINES[flags.machine or DEFAULT_MACHINE])
    if flags.plot:
        plot.of_traffic(flags.plot, found.traffic, drives)
    if not flags.json:
        return text.of_compiled(found, drives)
    life, traffic = endurance(found.traffic, drives), found.traffic
    parts: dict[str, Any] = {"compiled": found, "drives": drives, "traffic": traffic, "endurance": life}
    values = {name: dataclasses.asdict(part) for name, part in parts.items()}
    return _json(values | {"hides": traffic.hides(drives), "share": traffic.share(drives), **_rates(traffic)})


def _of_model(flags: argparse.Namespace) -> str:
    if flags.step_ms is not None:
        raise ValueError(f"--step-ms={flags.step_ms:g} is for --of; right would be --tflops for a model")
    if flags.runs is not None:
        raise ValueError(f"--runs={flags.runs[0]} is for --of; right would be without it for a model")
    found = project(scenario(flags))
    if flags.plot:
        plot.of_scenario(flags.plot, found)
    return _json(dataclasses.asdict(found) | _rates(found.traffic)) if flags.json else text.of_scenario(found)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1, allow_nan=False)  # JSON has no word for infinity


def _rates(traffic: Traffic) -> dict[str, Any]:
    names = ("write_bytes_s", "forward_write_bytes_s", "read_bytes_s")
    return {"needed": {name: getattr(traffic, name) for name in names}}


def scenario(flags: argparse.Namespace) -> Scenario:
    """The scenario that the flags say: a preset of a model or none, a machine, and single values over both.

    Raises:
        ValueError: a bad value; the message says what would be right.
    """
    preset = _run(flags)
    machine = MACHINES[flags.machine or preset.machine]
    head = preset.head if flags.head is None else flags.head
    tflops, source = _tflops(flags, preset, machine.device)
    return Scenario(
        model=_given(preset.model, flags),
        parallelism=_given(preset.parallelism, flags),
        batch=preset.batch if flags.batch is None else flags.batch,
        tflops=tflops,
        tflops_source=source,
        device=_device(flags, machine.device),
        drives=_drives(flags, machine),
        head=head,
        optimizer=flags.optimizer or preset.optimizer,
    )


def _run(flags: argparse.Namespace) -> Run:
    if flags.model:
        return RUNS[flags.model]
    missing = [_flag(name) for name in _NEEDED if getattr(flags, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; right would be a number for each, or --model with a preset")
    shape = {name: getattr(flags, name) for name in _NEEDED}
    return Run(model=Model(**shape), parallelism=Parallelism(), batch=1, machine=DEFAULT_MACHINE, head=True)


def _given(preset: Any, flags: argparse.Namespace) -> Any:
    """`preset`, a dataclass, with the values of the flags of the same names."""
    given = {f.name: getattr(flags, f.name, None) for f in dataclasses.fields(preset)}
    return dataclasses.replace(preset, **{name: value for name, value in given.items() if value is not None})


def _tflops(flags: argparse.Namespace, preset: Run, device: Device) -> tuple[float, str]:
    """What a GPU achieves, and who says so: as given, else a part of the peak as given, else of the preset, else of the
    machine."""
    if flags.tflops is not None:
        return float(flags.tflops), "as given"
    if flags.dtype == "fp32":
        raise ValueError("--dtype=fp32 has no rate, because peaks are those of 16 bits; right would be with --tflops")
    share = UTILISATION if flags.utilisation is None else float(flags.utilisation)
    if not 0 < share <= 1:
        raise ValueError(f"utilisation={share:g} is not possible; right would be above 0 and at most 1, e.g. 0.4")
    part = f"{share:.0%} of its peak" + (", a guess" if flags.utilisation is None else "")
    if flags.peak_tflops is not None:
        positive("peak_tflops", flags.peak_tflops, "TFLOP/s")
        return share * float(flags.peak_tflops), part
    measured = preset.tflops if device == MACHINES[preset.machine].device else 0.0
    if measured and flags.utilisation is None:
        return measured, "of the preset"
    return share * device.peak_tflops, part


def _device(flags: argparse.Namespace, device: Device) -> Device:
    changed = {name: getattr(flags, name) for name in ("memory_gib", "peak_tflops")}
    given = {name: value for name, value in changed.items() if value is not None}
    return dataclasses.replace(device, **given, name=f"{device.name}, changed") if given else device


def _drives(flags: argparse.Namespace, machine: Machine) -> Drives:
    drive = _given(DRIVES[flags.drive] if flags.drive else machine.drives.drive, flags)
    if any(getattr(flags, name) is not None for name in _DRIVE):
        drive = dataclasses.replace(drive, name=f"{drive.name}, changed")
    return Drives(
        drive=drive,
        count=machine.drives.count if flags.drives is None else flags.drives,
        link_gbps=machine.drives.link_gbps if flags.link_gbps is None else flags.link_gbps,
    )
