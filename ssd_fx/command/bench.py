"""The command `ssd-fx bench`: what a step of a small GPT costs with and without ssd_fx on this drive.

Two processes train the same model, a step of each in turn, so that a neighbour who slows the machine slows both.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median, quantiles
from typing import Any

from ssd_fx import check_options
from ssd_fx.command.toy import Shape, Step, worker
from ssd_fx.refusal import Refused, refusing

_MIB = 2**20
_WARMUP = 3  # pairs: the first one compiles, the next ones learn
_SPREAD = 1.25  # quartiles on both sides of 1 that are further apart show nothing
_EXAMPLES = """examples:
  ssd-fx bench /mnt/nvme                        two to three minutes, of which compiling is most
  ssd-fx bench /mnt/nvme --budget 0.5 --steps 30
  ssd-fx bench /mnt/nvme --layers 12 --width 384 --heads 6 --seq 512

exit status: 0 measured; 1 the training failed; 2 wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "bench",
        help="train a small GPT with and without ssd_fx, and compare",
        description="Train a small GPT with plain Inductor and with ssd_fx in turn, and compare time and memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", nargs="?", default=tempfile.gettempdir(), help="default: %(default)s")
    parser.add_argument("--budget", default="0", help="the option of that name; default %(default)s")
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="measured steps of each; default %(default)s"
    )
    for name, default in (("layers", 4), ("width", 256), ("heads", 4), ("batch", 8), ("seq", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print all steps as JSON, in seconds and bytes")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Train, print the comparison, and return the exit status: 1 if a training failed, 2 for a wrong value."""
    shape = Shape(flags.layers, flags.width, flags.heads, flags.batch, flags.seq)
    options = {"dirs": [flags.directory], "budget": flags.budget}
    with refusing(2):
        _check(shape, flags.steps)
        check_options(options)
    print(f"{shape}; compiling takes two to three minutes", file=sys.stderr, flush=True)
    try:
        with worker(shape, None) as plain, worker(shape, options) as ours:
            pairs = [(plain(), ours()) for _ in range(_WARMUP + flags.steps)][_WARMUP:]
    except RuntimeError as error:
        raise Refused(str(error), 1) from None
    if flags.json:
        shown = {"shape": asdict(shape), "options": options, **figures(pairs)}
        print(json.dumps(shown | {"steps": [[asdict(step) for step in pair] for pair in pairs]}, indent=1))
    else:
        print(table(pairs))
    return 0


def _check(shape: Shape, steps: int) -> None:
    """Raises:
    ValueError: a number that no model can have.
    """
    for name, value in (*asdict(shape).items(), ("steps", steps)):
        least = 2 if name in ("seq", "steps") else 1
        if value < least:
            raise ValueError(f"--{name}={value} is not possible; right would be {least} or more")
    if shape.width % shape.heads:
        raise ValueError(
            f"--width={shape.width} is no multiple of --heads={shape.heads}; right would be e.g. 256 and 4"
        )


Pairs = Sequence[tuple[Step, Step]]


def figures(pairs: Pairs) -> dict[str, float]:
    """The comparison as numbers: medians of steps and of the ratios within pairs, highest memory of all steps."""
    ratios = [ours.seconds / plain.seconds for plain, ours in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    moved = {name: median(ours.moved[name] for _, ours in pairs) for name in pairs[0][1].moved}
    return {
        "inductor_s": median(plain.seconds for plain, _ in pairs),
        "ssd_fx_s": median(ours.seconds for _, ours in pairs),
        "ratio": median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "inductor_resident_bytes": max(plain.resident_bytes for plain, _ in pairs),
        "ssd_fx_resident_bytes": max(ours.resident_bytes for _, ours in pairs),
        "losses_differ_by": max(abs(plain.loss - ours.loss) for plain, ours in pairs),
        **{name: moved[name] for name in ("stall_s", "saved_bytes", "offloaded_bytes", "written_bytes", "read_bytes")},
    }


def table(pairs: Pairs) -> str:
    """The comparison as text."""
    f = figures(pairs)
    memory = [f[f"{name}_resident_bytes"] / _MIB for name in ("inductor", "ssd_fx")]
    mib = {name: f"{f[f'{name}_bytes'] / _MIB:.1f}" for name in ("saved", "offloaded", "written", "read")}
    rows = [
        ("", "inductor", "ssd_fx"),
        ("step, ms", f"{1e3 * f['inductor_s']:.1f}", f"{1e3 * f['ssd_fx_s']:.1f}"),
        ("  ratio within pairs", "1", f"{f['ratio']:.3f} (quartiles {f['ratio_low']:.3f} to {f['ratio_high']:.3f})"),
        ("  of it waiting for the drive, ms", "-", f"{1e3 * f['stall_s']:.1f}"),
        ("most memory of the process, MiB", f"{memory[0]:.0f}", f"{memory[1]:.0f}"),
        *((f"{name} in a step, MiB", "-", text) for name, text in mib.items()),
        ("losses differ by at most", "", f"{f['losses_differ_by']:.1e}"),
    ]
    lines = [f"{name:36}{left:>10}  {right}" for name, left, right in rows]
    return "\n".join([*lines, "", verdict(f)])


def verdict(f: Mapping[str, float]) -> str:
    """What the figures say, or why they say nothing."""
    if not f["offloaded_bytes"]:
        return "Nothing was offloaded: each saved tensor is below `min_bytes`. Try a larger --width, --batch or --seq."
    memory = f["ssd_fx_resident_bytes"] / f["inductor_resident_bytes"]
    process = f"the process takes {memory:.2f} of its memory"
    if memory >= 1:
        process += ", because compiling takes more than so small a model can save"
    if f["ratio_low"] < 1 < f["ratio_high"] and f["ratio_high"] > _SPREAD * f["ratio_low"]:
        return f"The times vary too much: let nothing else run, or take more --steps. Beside Inductor {process}."
    return f"On this drive a step takes {f['ratio']:.2f} of Inductor's, and {process}."
