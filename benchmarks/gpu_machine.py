"""What the benchmarks on a GPU say of the machine, and where their results go."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of every such benchmark: `dir`, `results`, `name`, `device`, `print`, `allow_tmpfs`."""
    add = parser.add_argument
    add("--dir", help="directory on the NVMe drive")
    add("--results", default=str(ROOT / "benchmarks" / "results"), help="where the results go, default %(default)s")
    add("--name", default="", help="added to the names of the results")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: try the script out")
    add("--print", nargs="+", metavar="JSON", help="only print what these say")
    add("--allow-tmpfs", action="store_true", help=argparse.SUPPRESS)


def prepare(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Makes the directory. Ends the program where there is nothing to be measured."""
    if not flags.dir:
        parser.error("--dir is needed: a directory on the NVMe drive")
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here: torch sees no CUDA device, so nothing was run and nothing was written")
    flags.dir = os.path.abspath(flags.dir)
    os.makedirs(flags.dir, exist_ok=True)


def system(flags: argparse.Namespace) -> dict[str, str]:
    cuda = flags.device == "cuda"
    memory = f", {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB" if cuda else ""
    return {
        "device": torch.cuda.get_device_name(0) + memory if cuda else "cpu: a trial of this script, not a measurement",
        "driver": output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "host": f"{len(os.sched_getaffinity(0))} cores, kernel {platform.release()}",
        "directory": f"{flags.dir} on " + output(["findmnt", "-no", "FSTYPE,SOURCE", "-T", flags.dir]),
        "commit": output(["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]),
    }


def results_path(flags: argparse.Namespace, date: str, device: str, name: str) -> Path:
    """Where the results of a run go, without a suffix; the directory is there."""
    path = Path(flags.results) / "-".join(filter(None, (date, slug(device), name)))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.split(",")[0].split(":")[0].lower()).strip("-")


def output(command: list[str]) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return f"unknown ({command[0]} does not answer)"
    return " ".join(found.split()) or "unknown"
