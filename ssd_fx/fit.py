"""`ssd-fx fit script.py`: whether the model of a training script fits, and under which budget it trains fastest.

The script runs up to its first backward, and its model needs no memory (`script.py`). The graphs of that step are
planned under every budget, and added up.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ssd_fx.config import Config
from ssd_fx.estimate import BUDGETS, Asked, of_call, parsed_batch
from ssd_fx.hardware import DRIVES, MACHINES, Hardware
from ssd_fx.refusal import refusing
from ssd_fx.report.budgets import Estimate
from ssd_fx.script import add_script, until_trained
from ssd_fx.survey import TrainingStep

USAGE = (
    "ssd-fx fit script.py [--budget 0,0.5,2GiB] [--batch 8,16] [--memory 8GiB] [--machine h100] [-- the script's own "
    "arguments]"
)
_EXAMPLES = """examples:
  ssd-fx fit train.py --memory 8GiB
  ssd-fx fit train.py --budget 0,0.5,2GiB --batch 8,16 -- --epochs 1
  ssd-fx fit train.py --machine 4090 --drive samsung-9100-pro-4tb --drives 2

exit status: 0 fine; 1 the script cannot be estimated; 2 nothing fits the memory, or wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "fit",
        usage=USAGE,
        help="what a training script's step needs, for several budgets",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_script(parser)
    budgets = ",".join(map(str, BUDGETS))
    parser.add_argument("--budget", default=budgets, help="shares, sizes, auto; default %(default)s")
    parser.add_argument("--batch", help="other batch sizes than the script's")
    parser.add_argument("--memory", help="what the option `memory` would do, and what else fits, such as 8GiB")
    parser.add_argument(
        "--drive-tbw", default="0", help="how long drives last that are rated for so many TB, such as 600"
    )
    said = "plan for a GPU that is not here, in 16 bits, its memory and drives: "
    parser.add_argument("--machine", choices=MACHINES, metavar="NAME", help=said + ", ".join(MACHINES))
    said = "with --machine, other drives than the preset's: "
    parser.add_argument("--drive", choices=DRIVES, metavar="NAME", help=said + ", ".join(DRIVES))
    parser.add_argument("--drives", type=float, metavar="N", help="with --machine, how many drives a GPU has")
    said = "leave out what needs no drive: a checkpoint per layer, which takes one more trace, and PyTorch's budget"
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help=said)
    parser.add_argument("--json", action="store_true", help="print a list of estimates as JSON")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Run the command, and return its exit status. `flags.behind`: the words behind `--`, which are the script's.

    0: fine. 1: the script or its model cannot be estimated. 2: no row fits the memory, or a wrong flag.
    """
    with refusing(2):
        asked = Asked.of(flags.budget.split(","), flags.memory, flags.drive_tbw, rivals=flags.rivals)
        batches = [parsed_batch(batch) for batch in flags.batch.split(",")] if flags.batch else [None]
        there = _elsewhere(flags)
    options: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    if there is not None:
        options = partial(_options_there, there, asked.drive_tbw)
        asked = replace(asked, drive_tbw=0.0, whole=round(there.device.memory_gib * 2**30))
    with refusing(1):
        step = until_trained(flags.script, flags.behind, lambda gm: asked.look, options)
        if there is not None:
            step.there = {}  # a script's data need not be on the GPU that is not here
        inputs = sum(storage.nbytes() for storage in step.inputs.values())
        found = [
            asked.table(step, inputs, step.optimizers or None, step.other_bytes)
            if batch is None
            else _of_batch(step, batch, asked)
            for batch in batches
        ]
    if flags.json:
        print(json.dumps([each.details() for each in found], indent=1))
    else:
        print(*([] if there is None else [_told(there)]), *found, sep="\n\n")
    return 0 if all(each.best for each in found) else 2


def _of_batch(step: TrainingStep, batch: int, asked: Asked) -> Estimate:
    """The table of the step of a script with another batch size.

    Raises:
        ValueError: the step has several calls.
    """
    if len(step.calls) > 1:
        raise ValueError(
            f"batch={batch}: a step has {len(step.calls)} calls, which get their tensors from each other; right "
            "would be another batch size in the script"
        )
    (call,) = step.calls
    return of_call(call, asked, batch, step.optimizers or None, step.other_bytes, step.note)


def _elsewhere(flags: argparse.Namespace) -> Hardware | None:
    """The machine that is asked for, with its drives; None for this one.

    Raises:
        ValueError: drives without a machine, or no possible number of them.
    """
    drive, count = flags.drive, flags.drives
    if flags.machine is None:
        for name, value in (("drive", drive), ("drives", count)):
            if value is not None:
                raise ValueError(f"--{name}={value} is of --machine; right would be both, or `ssd-fx calibrate` here")
        return None
    machine = MACHINES[flags.machine]
    own = machine.drives
    other = replace(own, drive=DRIVES[drive] if drive else own.drive, count=own.count if count is None else count)
    return replace(machine, drives=other)


def _options_there(machine: Hardware, drive_tbw: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options to plan for on another machine, of those of a script.

    A preset's drives are one GPU's, so no rank shares them. Of what the user says of the node, this rank has its share.
    The temporary directory stands for directories that are not here. `drive_tbw`: the flag, which goes over the option.

    Raises:
        ValueError: an unknown option, or a bad value.
    """
    node = Config.make({**options, "drive_tbw": drive_tbw} if drive_tbw else options)
    return {
        **options,
        "machine": machine.rates(),
        "ranks": 1,
        "dirs": tempfile.gettempdir(),
        "allow_tmpfs": True,
        "host_budget": node.own_host_budget,
        "drive_tbw": node.own_drive_tbw or machine.drives.rated_tb,
    }


def _told(machine: Hardware) -> str:
    rates, drives = machine.rates(), machine.drives
    return (
        f"planned for {machine.device.name}: {rates['flops'] / 1e12:.0f} TFLOP/s in 16 bits, memory "
        f"{rates['memory_bw'] / 1e9:.0f} GB/s;\n{drives.count:g} x {drives.drive.name}: write "
        f"{rates['write_bw'] / 1e9:g} GB/s, read {rates['read_bw'] / 1e9:g} GB/s; docs/projection.md has the sources"
    )
