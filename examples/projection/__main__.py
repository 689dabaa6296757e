"""What offloading would need and cost for a model that nobody runs: bytes, rates, memory, life and price of drives.

python examples/projection --model megatron-18b
python examples/projection --model llama-3-8b --machine h100-e1s --drives 4 --price 900

docs/projection.md has the formulas. A preset gives defaults, and every flag goes over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from projection import text
from projection.formulas import Projection, project
from projection.presets import DEFAULT_MACHINE, RUNS, USD, UTILISATION, Training
from projection.scenario import ELEMENT_BYTES, Model, Parallelism, Scenario
from ssd_fx.hardware import DRIVES, MACHINES, Device, Drives, Hardware

LEAST, MOST = 1e-9, 1e9  # of anything that is counted or measured; far beyond, products are no floats any more
NEEDED = ("layers", "width", "heads", "sequence")
MODEL = {
    "layers": "",
    "width": "hidden size",
    "heads": "of attention",
    "kv_heads": "heads of keys and values; default: as many as heads",
    "ffn": "inner width of the MLP; default: four times the width",
    "sequence": "tokens of a sequence",
    "vocabulary": "tokens",
    "tp": "GPUs that share a layer (tensor parallel)",
    "pp": "pipeline stages",
    "dp": "GPUs with a share of the batch (data parallel)",
    "batch": "micro-batch, in sequences; default: 1",
}
SWITCHES = {
    "gated": "the MLP is gated",
    "dropout": "",
    "tied": "the head has the matrix of the embedding",
    "sp": "sequence parallel",
    "head": "count embedding, head and logits too; default: not for presets of papers, which leave them out",
}
DEVICE = {"memory_gib": "its memory", "peak_tflops": "its peak, instead of --tflops"}
DRIVE = {
    "write_gbps": "10^9 bytes a second that one drive writes",
    "read_gbps": "10^9 bytes a second that one drive reads",
    "capacity_tb": "10^12 bytes that one drive holds",
    "tbw": "rated endurance of one drive, in 10^12 bytes",
}
HARDWARE = {
    "tflops": "TFLOP/s that one GPU achieves",
    "utilisation": f"part of the peak that it achieves; default: {UTILISATION}",
    "drives": "drives per GPU; 0.5 for four drives of eight GPUs",
    "link_gbps": "10^9 bytes a second each way between a GPU and its drives",
    "price": "US dollars for a drive",
    **DEVICE,
    **DRIVE,
}


def number(kind: Callable[[str], float], least: float, most: float = MOST) -> Callable[[str], float]:
    """What reads a number of a flag from `least` to `most`."""

    def parse(given: str) -> float:
        try:
            value = kind(given)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"{given!r} is not possible; right would be {what} from {least:g} to {most:g}"
            )
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags, which are None where they are not given."""
    made = argparse.ArgumentParser(
        prog="python examples/projection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def flag(name: str, **how: Any) -> None:
        made.add_argument(f"--{name.replace('_', '-')}", dest=name, **how)

    flag("model", choices=RUNS, metavar="NAME", help=f"a preset: {', '.join(RUNS)}")
    for name, meaning in MODEL.items():
        flag(name, type=number(int, 0 if name in ("kv_heads", "ffn", "vocabulary") else 1), metavar="N", help=meaning)
    for name, meaning in SWITCHES.items():
        flag(name, action=argparse.BooleanOptionalAction, help=meaning)
    flag("zero", type=number(int, 0, 3), metavar="N", help="stage of ZeRO, 0 to 3")
    flag("dtype", choices=ELEMENT_BYTES, help="of activations")
    flag("attention", choices=("flash", "matrix"))
    flag("optimizer", choices=("adam", "sgd"))
    default = f"default: that of the model's preset, or {DEFAULT_MACHINE}"
    flag("machine", choices=MACHINES, metavar="NAME", help=f"a GPU: {', '.join(MACHINES)}; {default}")
    flag("drive", choices=DRIVES, metavar="NAME", help=f"another drive: {', '.join(DRIVES)}")
    for name, meaning in HARDWARE.items():
        least, most = 0.0 if name == "price" else LEAST, 1.0 if name == "utilisation" else MOST
        flag(name, type=number(float, least, most), metavar="X", help=meaning)
    return made


def projected(words: Sequence[str]) -> Projection:
    """The projection that the words of a command line ask for.

    Raises:
        ValueError: numbers that do not go together; the message says what would be right.
        SystemExit: a wrong word.
    """
    flags = parser().parse_args(words)
    preset = _training(flags)
    hardware = MACHINES[flags.machine or preset.machine]
    tflops, source = _tflops(flags, preset, hardware.device)
    device, drives = _renamed(hardware.device, flags, DEVICE), _drives(flags, hardware)
    return project(
        Scenario(
            model=_given(preset.model, flags),
            parallelism=_given(preset.parallelism, flags),
            batch=flags.batch or preset.batch,
            tflops=tflops,
            tflops_source=source,
            device=device,
            drives=drives,
            device_usd=USD.get(hardware.device.name, 0.0),
            drive_usd=USD.get(flags.drive or hardware.drives.drive.name, 0.0) if flags.price is None else flags.price,
            head=preset.head if flags.head is None else flags.head,
            optimizer=flags.optimizer or preset.optimizer,
        )
    )


def _training(flags: argparse.Namespace) -> Training:
    if flags.model:
        return RUNS[flags.model]
    missing = [f"--{name}" for name in NEEDED if getattr(flags, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; right would be a number for each, or --model with a preset")
    shape = {name: getattr(flags, name) for name in NEEDED}
    return Training(model=Model(**shape), parallelism=Parallelism(), batch=1, machine=DEFAULT_MACHINE, head=True)


def _given(preset: Any, flags: argparse.Namespace) -> Any:
    """`preset`, a dataclass, with the values of the flags that have the names of its fields."""
    given = {field.name: getattr(flags, field.name, None) for field in dataclasses.fields(preset)}
    return dataclasses.replace(preset, **{name: value for name, value in given.items() if value is not None})


def _renamed(part: Any, flags: argparse.Namespace, names: dict[str, str]) -> Any:
    """`part` with the values of the flags `names`, and under another name if there are any."""
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return dataclasses.replace(part, name=f"{part.name}, changed", **given) if given else part


def _tflops(flags: argparse.Namespace, preset: Training, device: Device) -> tuple[float, str]:
    """What a GPU achieves, and who says so: as given, else a part of the peak as given, else of the preset, else of the
    machine."""
    if flags.tflops is not None:
        return float(flags.tflops), "as given"
    if flags.dtype == "fp32":
        raise ValueError("--dtype=fp32 has no rate, because peaks are those of 16 bits; right would be with --tflops")
    share = UTILISATION if flags.utilisation is None else float(flags.utilisation)
    part = f"{share:.0%} of its peak" + (", a guess" if flags.utilisation is None else "")
    if flags.peak_tflops is not None:
        return share * float(flags.peak_tflops), part
    measured = preset.tflops if device == MACHINES[preset.machine].device else 0.0
    if measured and flags.utilisation is None:
        return measured, "of the preset"
    return share * device.peak_tflops, part


def _drives(flags: argparse.Namespace, hardware: Hardware) -> Drives:
    own = hardware.drives
    return Drives(
        drive=_renamed(DRIVES[flags.drive] if flags.drive else own.drive, flags, DRIVE),
        count=own.count if flags.drives is None else flags.drives,
        link_gbps=own.link_gbps if flags.link_gbps is None else flags.link_gbps,
    )


if __name__ == "__main__":
    try:
        print(text.of_scenario(projected(sys.argv[1:])))
    except ValueError as error:
        print(f"projection: {error}", file=sys.stderr)
        sys.exit(2)
