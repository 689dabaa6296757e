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
from projection.presets import RUNS, USD, UTILISATION, Preset
from projection.scenario import ELEMENT_BYTES, Model, Parallelism, Scenario
from ssd_fx.hardware import DRIVES, MACHINES, Device, Drives, Hardware

LEAST, MOST = 1e-9, 1e9  # of anything that is counted or measured; far beyond, products are no floats any more
NEEDED = ("layers", "width", "heads", "sequence")
NUMBERS = {  # whole ones, with their defaults
    "layers": (None, ""),
    "width": (None, "hidden size"),
    "heads": (None, "of attention"),
    "sequence": (None, "tokens of a sequence"),
    "vocabulary": (0, "tokens; default: embedding and head are of no interest"),
    "kv_heads": (0, "heads of keys and values; default: as many as heads"),
    "ffn": (0, "inner width of the MLP; default: four times the width"),
    "tp": (1, "GPUs that share a layer (tensor parallel)"),
    "pp": (1, "pipeline stages"),
    "dp": (1, "GPUs with a share of the batch (data parallel)"),
    "batch": (1, "micro-batch, in sequences"),
    "zero": (0, "stage of ZeRO, 0 to 3"),
}
SWITCHES = {
    "gated": (False, "the MLP is gated"),
    "dropout": (True, "default: with"),
    "tied": (True, "the head has the matrix of the embedding; default: it has"),
    "sp": (False, "sequence parallel"),
    "head": (True, "count embedding, head and logits too; presets of papers leave them out"),
}
CHOICES = {"dtype": tuple(ELEMENT_BYTES), "attention": ("flash", "matrix"), "optimizer": ("adam", "sgd")}
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
            what = f"{'a whole' if kind is int else 'a'} number from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{given!r} is not possible; right would be {what}")
        return value

    return parse


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    made = argparse.ArgumentParser(
        prog="python examples/projection", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def flag(name: str, **how: Any) -> None:
        made.add_argument(f"--{name.replace('_', '-')}", dest=name, **how)

    flag("model", choices=RUNS, metavar="NAME", help=f"a preset: {', '.join(RUNS)}")
    for name, (default, meaning) in NUMBERS.items():
        possible = number(int, 0 if default == 0 else 1, 3 if name == "zero" else MOST)
        flag(name, type=possible, default=default, metavar="N", help=meaning)
    for name, (on, meaning) in SWITCHES.items():
        flag(name, action=argparse.BooleanOptionalAction, default=on, help=meaning)
    for name, choices in CHOICES.items():
        flag(name, choices=choices, default=choices[0])
    flag("machine", choices=MACHINES, default="a100-40g", metavar="NAME", help=f"a GPU: {', '.join(MACHINES)}")
    flag("drive", choices=DRIVES, metavar="NAME", help=f"another drive: {', '.join(DRIVES)}")
    for name, meaning in HARDWARE.items():
        least, most = (0.0 if name == "price" else LEAST), (1.0 if name == "utilisation" else MOST)
        flag(name, type=number(float, least, most), metavar="X", help=meaning)
    return made


def projected(words: Sequence[str]) -> Projection:
    """The projection that the words of a command line ask for.

    Raises:
        ValueError: numbers that do not go together; the message says what would be right.
        SystemExit: a wrong word.
    """
    preset = RUNS.get(parser().parse_args(words).model, Preset())
    own, flags = (parser().parse_args([*preset.words.split(), *given]) for given in ([], words))
    if missing := [f"--{name}" for name in NEEDED if getattr(flags, name) is None]:
        raise ValueError(f"{', '.join(missing)} missing; right would be a number for each, or --model with a preset")
    hardware = MACHINES[flags.machine]
    known = preset.tflops if hardware.device == MACHINES[own.machine].device else 0.0
    tflops, source = _tflops(flags, known, hardware.device)
    usd = USD.get(flags.drive or hardware.drives.drive.name, 0.0)
    return project(
        Scenario(
            model=_made(Model, flags),
            parallelism=_made(Parallelism, flags),
            batch=flags.batch,
            tflops=tflops,
            tflops_source=source,
            device=_renamed(hardware.device, flags, DEVICE),
            drives=_drives(flags, hardware),
            device_usd=USD.get(hardware.device.name, 0.0),
            drive_usd=usd if flags.price is None else flags.price,
            head=flags.head,
            optimizer=flags.optimizer,
        )
    )


def _made(kind: type[Any], flags: argparse.Namespace) -> Any:
    """A dataclass of the flags that have the names of its fields."""
    return kind(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(kind)})


def _renamed(part: Any, flags: argparse.Namespace, names: dict[str, str]) -> Any:
    """`part` with the values of the flags `names`, and under another name if there are any."""
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return dataclasses.replace(part, name=f"{part.name}, changed", **given) if given else part


def _tflops(flags: argparse.Namespace, known: float, device: Device) -> tuple[float, str]:
    """What a GPU achieves, and who says so: as given, else a part of the peak as given, else as `known` of the preset,
    else of the machine."""
    if flags.tflops is not None:
        return float(flags.tflops), "as given"
    if flags.dtype == "fp32":
        raise ValueError("--dtype=fp32 has no rate, because peaks are those of 16 bits; right would be with --tflops")
    if known and flags.peak_tflops is None and flags.utilisation is None:
        return known, "of the preset"
    share, peak = flags.utilisation or UTILISATION, flags.peak_tflops or device.peak_tflops
    return share * peak, f"{share:.0%} of its peak" + ("" if flags.utilisation else ", a guess")


def _drives(flags: argparse.Namespace, hardware: Hardware) -> Drives:
    own = hardware.drives
    return Drives(
        drive=_renamed(DRIVES[flags.drive] if flags.drive else own.drive, flags, DRIVE),
        count=flags.drives or own.count,
        link_gbps=flags.link_gbps or own.link_gbps,
    )


if __name__ == "__main__":
    try:
        print(text.of_scenario(projected(sys.argv[1:])))
    except ValueError as error:
        print(f"projection: {error}", file=sys.stderr)
        sys.exit(2)
