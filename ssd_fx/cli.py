"""The command `ssd-fx`: what this machine offers.

ssd-fx check /mnt/nvme     whether the directory is fit for activations, and how fast the runtime writes and reads
ssd-fx calibrate /mnt/nvme measure the rates that plans are made for, and keep them in the cache directory
ssd-fx info                versions, the device, whether GPUDirect Storage is real, and the default options
ssd-fx project --model megatron-18b   bytes, rates, life and cost of drives for a model, by formulas
ssd-fx fit script.py       what a step of a training script needs, under several budgets, without training
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

import ssd_fx
from ssd_fx import fit
from ssd_fx.calibration import calibrate
from ssd_fx.config import Config
from ssd_fx.passes.cost.machine import described
from ssd_fx.projection import command as projection
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.engines.registry import check_engine
from ssd_fx.sizes import format_bytes

_TENSORS, _TENSOR_BYTES = 16, 16 << 20
_ALL_TO_THE_DRIVE = {"budget": 0, "host_budget": 0, "compression": "", "adapt": False}  # overrides the environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status.

    0: fine. 1: the directory is unfit, the cores are busy, or a script does not fit. 2: a wrong word on the command
    line or in the environment. 141, a shell's status for SIGPIPE: the reader of the output has gone.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 128 + signal.SIGPIPE
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage, which is long."""
        self.exit(2, f"ssd-fx: {message}; {self.prog} --help has all words\n")


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(prog="ssd-fx", description="Activations on NVMe: what this machine offers, and what they need.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="write and read activations in a directory and print the rates")
    check.add_argument("directory")
    measure = commands.add_parser("calibrate", help="measure the machine and a directory for the planner")
    measure.add_argument("directory")
    measure.add_argument("--wait", action="store_true", help="first wait until other processes leave the cores idle")
    measure.add_argument("--force", action="store_true", help="keep what is measured though others use the cores")
    commands.add_parser("info", help="versions, device, GPUDirect Storage, default options")
    projection.add(commands)
    fit.add_parser(commands)
    own, arguments = fit.split(sys.argv[1:] if argv is None else argv)
    flags = parser.parse_args(own)
    if flags.command == "project":
        return projection.run(flags)  # of no options of this environment
    try:
        Config.make()
    except ValueError as error:
        print(f"ssd-fx: {error}", file=sys.stderr)
        return 2
    if flags.command == "info":
        return _info()
    if flags.command == "fit":
        return fit.fit(flags, arguments)
    if flags.command == "check":
        return _check(flags.directory)
    return _calibrate(flags.directory, wait=flags.wait, force=flags.force)


def _info() -> int:
    print(f"ssd_fx   {ssd_fx.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"device   {_device()}")
    found = cufile.status(cufile.Driver())
    print(f"{found.name:8} {_gds(found)}")
    print(f"options  {json.dumps(dataclasses.asdict(Config.make()), default=str)}")
    for section, entries in calibrate.cached().items():
        for hardware, rates in entries.items():
            print(f"{section:8} {hardware}")
            print(*(f"         {line}" for line in described(rates)), sep="\n")
    return 0


def _is_fit(directory: str) -> bool:
    """Whether activations may go to `directory`; prints why not."""
    try:
        check_engine("posix")
        check_directory(directory)
    except (OSError, RuntimeError) as error:
        print(f"unfit: {error}", file=sys.stderr)
        return False
    return True


def _calibrate(directory: str, *, wait: bool, force: bool) -> int:
    if not _is_fit(directory):
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = parse(Config.make({"dirs": [directory]}).runtime_json())
    if wait:
        print("waiting until other processes leave the cores idle", flush=True)
        calibrate.wait_until_idle()
    started = time.perf_counter()
    machine = calibrate.calibrated(config, device, again=True, though_busy=force)
    print(*described(machine.rates()), sep="\n")
    took = f"measured in {time.perf_counter() - started:.1f} s"
    missed = calibrate.unmeasured(config, device)
    if missed:
        print(f"{took}; {' and '.join(missed)} above are typical rates, and {calibrate.cache_path()} has what it had")
        print("--wait measures when the cores are idle, --force keeps the rates of busy ones")
        return 1
    print(f"{took}; kept in {calibrate.cache_path()}")
    return 0


def _device() -> str:
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads; torch sees no CUDA device"
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    return f"{name}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _gds(found: cufile.Status) -> str:
    version = f"{found.version}: " if found.version else ""
    if found.real:
        return f"{version}GPUDirect Storage is real; blocks are not verified with it, whatever `checksums` says"
    return f"{version}no GPUDirect Storage: {found.reason}"


def _check(directory: str) -> int:
    if not _is_fit(directory):
        return 1
    options = {"dirs": [directory], "engine": "posix", "inflight": _TENSORS * _TENSOR_BYTES}
    config = Config.make(options | _ALL_TO_THE_DRIVE).runtime_json()
    tensors = [torch.full((_TENSOR_BYTES,), i, dtype=torch.uint8) for i in range(_TENSORS)]
    free = os.statvfs(directory)
    try:
        for name in ("first pass (the file grows)", "second pass (its space is reused)"):
            print(f"{name:34} {_rates(tensors, config)}")
    except OSError as error:
        space = f"{format_bytes(free.f_bavail * free.f_frsize)} were free there"
        print(f"unfit: {error}; {space}, of which 1 GiB or 5% of the file system stay free", file=sys.stderr)
        return 1
    finally:
        ssd_fx.close()
    return 0


def _rates(tensors: list[torch.Tensor], config: str) -> str:
    """A line with the rates at which all `tensors` are written and read. Prints the runtime's warnings.

    Raises:
        OSError: some stayed in memory, so the rates are not those of the drive.
    """
    ssd_fx.reset_stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        write_s, read_s = _round_trip(tensors, config)
    for warning in caught:
        print(warning.message, file=sys.stderr)
    moved = min(ssd_fx.stats().written_bytes, ssd_fx.stats().read_bytes)
    nbytes = _TENSORS * _TENSOR_BYTES
    if moved < nbytes:
        raise OSError(f"of {format_bytes(nbytes)} only {format_bytes(moved)} went to the drive and came back")
    return f"write {nbytes / 1e6 / write_s:7.0f} MB/s   read {nbytes / 1e6 / read_s:7.0f} MB/s"


def _round_trip(tensors: list[torch.Tensor], config: str) -> tuple[float, float]:
    """Seconds to store all `tensors`, and seconds to load them.

    Raises:
        RuntimeError: a loaded tensor is not what was stored.
    """
    ops = torch.ops.ssd_fx
    start = time.perf_counter()
    handles = [ops.store(t, config, "check", i, i) for i, t in enumerate(tensors)]
    for i, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
        ops.wait_store_(handle, tensor, len(tensors) + i)
    written = time.perf_counter()
    loaded = [ops.load(h, [_TENSOR_BYTES], [1], torch.uint8, torch.device("cpu"), 0, True) for h in handles]
    for handle, tensor in zip(handles, loaded, strict=True):
        ops.wait_load_(tensor, handle, 0)
    end = time.perf_counter()
    if not all(torch.equal(a, b) for a, b in zip(tensors, loaded, strict=True)):
        raise RuntimeError("what was read is not what was written")
    return written - start, end - written
