"""The command `ssd-fx project`: flags, presets, and what goes where."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any

from ssd_fx.projection import text
from ssd_fx.projection.checks import positive
from ssd_fx.projection.compiled import Compiled, read
from ssd_fx.projection.formulas import Projection, StepIO, endurance, project
from ssd_fx.projection.presets import DEFAULT_MACHINE, DRIVES, MACHINES, RUNS, UTILISATION, Hardware, Training
from ssd_fx.projection.scenario import ELEMENT_BYTES, Device, Drive, Drives, Model, Parallelism, Scenario
from ssd_fx.refusal import refusing

_NEEDED = ("layers", "width", "heads", "sequence")
_SHAPE = ("layers", "width", "heads", "kv_heads", "ffn", "sequence", "vocabulary", "tp", "pp", "dp", "batch")
_SWITCHES = ("gated", "dropout", "tied", "sp", "head")
_CHOICES = {"zero": range(4), "dtype": ELEMENT_BYTES, "attention": ("flash", "matrix"), "optimizer": ("adam", "sgd")}
_GPU = ("tflops", "peak_tflops", "utilisation", "memory_gib")
_DEVICE = ("memory_gib", "peak_tflops")  # of _GPU, what is the device's
_DRIVE = ("write_gbps", "read_gbps", "capacity_tb", "tbw")
_MEANINGS = {
    f.name: f.metadata["meaning"]
    for part in (Model, Parallelism, Device, Drive)
    for f in dataclasses.fields(part)
    if "meaning" in f.metadata
} | {
    "batch": "micro-batch, in sequences; default: 1",
    "head": "count embedding, head and logits too; default: not for presets of papers, which leave them out",
    "optimizer": "adam or sgd",
    "tflops": "TFLOP/s that one GPU achieves",
    "utilisation": f"part of the peak that it achieves; default: {UTILISATION}",
    "drives": "drives per GPU; 0.5 for four drives of eight GPUs",
    "link_gbps": "10^9 bytes a second each way between a GPU and its drives",
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
    often = "with --of: how often a step runs the graphs, one number for all or one for each; default: once"
    out.add_argument("--runs", nargs="+", type=_number(int), metavar="N", help=often)
    out.add_argument("--step-ms", type=_number(float), help="with --of: forward and backward, instead of as predicted")
    out.add_argument("--json", action="store_true", help="print JSON; rates are bytes a second")
    parser.set_defaults(run=run)


def _add_model(group: Any) -> None:
    group.add_argument("--model", choices=RUNS, metavar="NAME", help=f"a preset: {', '.join(RUNS)}")
    _add_numbers(group, int, _SHAPE)
    for name in _SWITCHES:
        group.add_argument(_flag(name), dest=name, action=argparse.BooleanOptionalAction, help=_MEANINGS[name])
    for name, choices in _CHOICES.items():
        kind: Any = {"type": _number(int), "metavar": "N"} if name == "zero" else {"metavar": "NAME"}
        group.add_argument(_flag(name), choices=choices, help=_MEANINGS[name], **kind)


def _add_device(group: Any) -> None:
    presets = f"a preset: {', '.join(MACHINES)}; default: that of the model's preset, or {DEFAULT_MACHINE}"
    group.add_argument("--machine", choices=MACHINES, metavar="NAME", help=presets)
    _add_numbers(group, float, (*_GPU, *_DRIVE, "drives", "link_gbps"))
    group.add_argument("--drive", choices=DRIVES, metavar="NAME", help=f"a preset: {', '.join(DRIVES)}")
    group.add_argument("--price", dest="price_usd", type=_number(float), metavar="X", help="US dollars for a drive")


def _add_numbers(group: Any, kind: type[int] | type[float], names: Iterable[str]) -> None:
    for name in names:
        metavar = "N" if kind is int else "X"
        group.add_argument(_flag(name), dest=name, type=_number(kind), metavar=metavar, help=_MEANINGS[name])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(flags: argparse.Namespace) -> int:
    """Print the projection, and return the exit status: 2 for a wrong value, which one line on stderr names."""
    with refusing(2):
        found = _of_plan(flags) if flags.of else _of_model(flags)
    print(found)
    return 0


def _of_plan(flags: argparse.Namespace) -> str:
    found, drives = compiled(flags)
    if not flags.json:
        return text.of_compiled(found, drives)
    traffic = found.traffic
    parts: dict[str, Any] = {"compiled": found, "drives": drives, "traffic": traffic}
    values = {name: dataclasses.asdict(part) for name, part in parts.items()}
    values["endurance"] = dataclasses.asdict(endurance(traffic, drives))
    return _json(values | {"hides": traffic.hides(drives), "share": traffic.share(drives)}, traffic)


def _of_model(flags: argparse.Namespace) -> str:
    found = projected(flags)
    return _json(dataclasses.asdict(found), found.traffic) if flags.json else text.of_scenario(found)


def _json(values: dict[str, Any], traffic: StepIO) -> str:
    needed = {name: getattr(traffic, name) for name in ("write_bytes_s", "forward_write_bytes_s", "read_bytes_s")}
    return json.dumps(values | {"needed": needed}, indent=1, allow_nan=False)  # JSON has no word for infinity


def compiled(flags: argparse.Namespace) -> tuple[Compiled, Drives]:
    """The plans that `--of` names, and the drives.

    Raises:
        OSError: a plan cannot be read.
        ValueError: a bad value; the message says what would be right.
    """
    for name in ("model", "batch", "dtype", "attention", "optimizer", "zero", *_SHAPE[:-1], *_SWITCHES, *_GPU):
        if getattr(flags, name) is not None:
            raise ValueError(f"{_flag(name)}={getattr(flags, name)} is of a model; right would be without --of")
    if flags.step_ms is not None:
        positive("step_ms", flags.step_ms, "milliseconds")
    found = read(flags.of, flags.step_ms and flags.step_ms / 1e3, flags.runs or (1,))
    return found, _drives(flags, MACHINES[flags.machine or DEFAULT_MACHINE])


def projected(flags: argparse.Namespace) -> Projection:
    """The projection of a preset of a model or none, a machine, and single values over both.

    Raises:
        ValueError: a bad value; the message says what would be right.
    """
    if flags.step_ms is not None:
        raise ValueError(f"--step-ms={flags.step_ms:g} is for --of; right would be --tflops for a model")
    if flags.runs is not None:
        raise ValueError(f"--runs={flags.runs[0]} is for --of; right would be without it for a model")
    preset = _training(flags)
    hardware = MACHINES[flags.machine or preset.machine]
    tflops, source = _tflops(flags, preset, hardware.device)
    scenario = Scenario(
        model=_given(preset.model, flags),
        parallelism=_given(preset.parallelism, flags),
        batch=preset.batch if flags.batch is None else flags.batch,
        tflops=tflops,
        tflops_source=source,
        device=_renamed(_given(hardware.device, flags, *_DEVICE), flags, _DEVICE),
        drives=_drives(flags, hardware),
        head=preset.head if flags.head is None else flags.head,
        optimizer=flags.optimizer or preset.optimizer,
    )
    return project(scenario)


def _training(flags: argparse.Namespace) -> Training:
    if flags.model:
        return RUNS[flags.model]
    missing = [_flag(name) for name in _NEEDED if getattr(flags, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; right would be a number for each, or --model with a preset")
    shape = {name: getattr(flags, name) for name in _NEEDED}
    return Training(model=Model(**shape), parallelism=Parallelism(), batch=1, machine=DEFAULT_MACHINE, head=True)


def _given(preset: Any, flags: argparse.Namespace, *names: str) -> Any:
    """`preset`, a dataclass, with the values of the flags of the same names: of all its fields, or of some."""
    given = {name: getattr(flags, name, None) for name in names or [f.name for f in dataclasses.fields(preset)]}
    return dataclasses.replace(preset, **{name: value for name, value in given.items() if value is not None})


def _tflops(flags: argparse.Namespace, preset: Training, device: Device) -> tuple[float, str]:
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


def _drives(flags: argparse.Namespace, hardware: Hardware) -> Drives:
    drive = _given(DRIVES[flags.drive] if flags.drive else hardware.drives.drive, flags)
    return Drives(
        drive=_renamed(drive, flags, _DRIVE),
        count=hardware.drives.count if flags.drives is None else flags.drives,
        link_gbps=hardware.drives.link_gbps if flags.link_gbps is None else flags.link_gbps,
    )


def _renamed(part: Any, flags: argparse.Namespace, names: Iterable[str]) -> Any:
    """`part`, under another name if a flag among `names` has changed it."""
    changed = any(getattr(flags, name) is not None for name in names)
    return dataclasses.replace(part, name=f"{part.name}, changed") if changed else part
