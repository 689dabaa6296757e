"""The command `ssd-fx calibrate`: measure the rates that plans are made for, and keep them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from typing import Any

import torch

from ssd_fx.backend import check_options
from ssd_fx.calibration import cache, calibrate
from ssd_fx.calibration.timing import wait_until_idle
from ssd_fx.options import Options
from ssd_fx.passes.cost.machine import described
from ssd_fx.refusal import refusing
from ssd_fx.runtime.config import parse

_EXAMPLES = """examples:
  ssd-fx calibrate /mnt/nvme            best when nothing else uses the cores
  ssd-fx calibrate /mnt/nvme --wait     first wait until that is so
  ssd-fx calibrate /mnt/a /mnt/b        two drives that are striped

exit status: 0 measured and kept; 1 not measured, as on a full drive, or not kept; 2 wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the machine and directories for the planner",
        description="Measure the rates that plans are made for, and keep them in the cache directory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    said = "where activations would go; several are measured together, as the stripe that they are with the option dirs"
    parser.add_argument("directory", nargs="+", type=os.path.expanduser, help=said)
    parser.add_argument("--wait", action="store_true", help="first wait until other processes leave the cores idle")
    parser.add_argument("--json", action="store_true", help="print the rates as JSON, in bytes, seconds and flops")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Measure and print the rates. The exit status is 1 if some were not measured, or could not be kept."""
    with refusing(1):
        kept_in = cache.path()
        config = parse(check_options({"dirs": flags.directory}).runtime_json())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if flags.wait:
        print("waiting until other processes leave the cores idle", file=sys.stderr, flush=True)
        wait_until_idle()
    started = time.perf_counter()
    could_keep = _measure(config, device)
    took_s = time.perf_counter() - started
    found, missed = calibrate.known_rates(config, device), calibrate.unmeasured(config, device)
    rates = {name: rate for section in found.values() for name, rate in section.items()}
    kept = could_keep and bool(rates)
    status = 0 if kept and not missed else 1
    if flags.json:
        print(json.dumps({"rates": rates, "unmeasured": missed, "cache": str(kept_in), "kept": kept}, indent=1))
        return status
    if rates:
        print(*described(rates), sep="\n")
        print(f"{' and '.join(found)} measured in {took_s:.1f} s; {f'kept in {kept_in}' if kept else 'not kept'}")
    stored = calibrate.stored(config, device)
    for section in missed:
        if section in stored:
            print(f"{section} not measured; its rates of before stay in {kept_in}")
        else:
            print(f"{section} not measured, and no rates of it are kept, so plans take typical ones")
    return status


def _measure(config: Options, device: torch.device) -> bool:
    """Measure the rates, and return whether they can be kept.

    Print why some could not be measured, without the warning's advice: it is to run this command.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        calibrate.calibrated(config, device, again=True)
    found = [warning.message for warning in caught]
    for said in found:
        reason = f"not measured: {said.reason}" if isinstance(said, calibrate.NotMeasured) else str(said)
        print(f"ssd-fx: {reason}", file=sys.stderr)
    return not any(isinstance(said, cache.NotKept) for said in found)
