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
from ssd_fx.passes.cost.machine import Machine, described
from ssd_fx.refusal import refusing
from ssd_fx.runtime.config import parse

_EXAMPLES = """examples:
  ssd-fx calibrate /mnt/nvme            best when nothing else uses the cores
  ssd-fx calibrate /mnt/nvme --wait     first wait until that is so

exit status: 0 measured and kept; 1 not measured, as on a full drive; 2 wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the machine and a directory for the planner",
        description="Measure the rates that plans are made for, and keep them in the cache directory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=os.path.expanduser)
    parser.add_argument("--wait", action="store_true", help="first wait until other processes leave the cores idle")
    parser.add_argument("--json", action="store_true", help="print the rates as JSON, in bytes, seconds and flops")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Measure and print the rates. The exit status is 1 if they are not those of this machine."""
    with refusing(1):
        kept_in = cache.path()
        config = parse(check_options({"dirs": [flags.directory]}).runtime_json())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if flags.wait:
        print("waiting until other processes leave the cores idle", file=sys.stderr, flush=True)
        wait_until_idle()
    started = time.perf_counter()
    rates = _measured(config, device).rates()
    missed = calibrate.unmeasured(config, device)
    if flags.json:
        print(json.dumps({"rates": dict(rates), "unmeasured": missed, "cache": str(kept_in)}, indent=1))
        return 1 if missed else 0
    print(*described(rates), sep="\n")
    took = f"measured in {time.perf_counter() - started:.1f} s"
    if not missed:
        print(f"{took}; kept in {kept_in}")
        return 0
    names = " and ".join(missed)
    print(f"{took}; the rates of {names} above are typical ones. The stored rates of {names} were left as they were.")
    return 1


def _measured(config: Options, device: torch.device) -> Machine:
    """Measure the rates. Print why some are typical ones, without the warning's advice: it is to run this command."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        machine = calibrate.calibrated(config, device, again=True)
    for warning in caught:
        said = warning.message
        reason = f"not measured: {said.reason}" if isinstance(said, calibrate.NotMeasured) else str(said)
        print(f"ssd-fx: {reason}", file=sys.stderr)
    return machine
