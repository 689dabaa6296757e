"""What every benchmark prints first, and how CPU time of the I/O threads is told from the rest."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
IO_THREADS = "ssd_fx-io"  # what the runtime calls them
MIB = 2**20


def machine(directory: str | None) -> dict[str, str]:
    """Where this is measured: hardware, software, the file system of `directory`, the commit."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t :") or "unknown"
    memory = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) / MIB
    return {
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads for torch",
        "memory": f"{memory:.1f} GiB; load average {os.getloadavg()[0]:.1f} before the start",
        "kernel": platform.release(),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "directory": file_system(directory) if directory else "the backend's default",
        "commit": commit(),
    }


def announce(directory: str | None, *, width: int = 10, **more: str) -> dict[str, str]:
    """Print what `machine` says, and `more`; return it."""
    where = machine(directory) | more
    for name, text in where.items():
        print(f"{name:{width}} {text}", flush=True)
    return where


def write_json(path: str | Path, found: object) -> None:
    """Whoever ends the program meanwhile leaves the file as it was."""
    fresh = Path(f"{path}.new")
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    fresh.replace(path)


def io_cpu_s() -> float | None:
    """CPU seconds that this process's I/O threads have used so far, or None when there are none."""
    total = None
    for task in Path("/proc/self/task").iterdir():
        try:
            name, stat = (task / "comm").read_text(), (task / "stat").read_text()
        except FileNotFoundError:
            continue  # it ended meanwhile
        if name.startswith(IO_THREADS):
            user, system = stat.rpartition(")")[2].split()[11:13]
            total = (total or 0.0) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def resident_bytes() -> int:
    """The memory that this process has now."""
    return _status("VmRSS")


def resident_peak_bytes() -> int:
    """The most memory that this process has had since `reset_resident_peak`."""
    return _status("VmHWM")


def data_bytes(process: int) -> int:
    """The private writable memory that a process has asked for, which RLIMIT_DATA limits; 0 when it has ended."""
    try:
        return _status("VmData", process)
    except (OSError, IndexError):
        return 0


def reset_resident_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def _status(field: str, process: int | str = "self") -> int:
    return int(Path(f"/proc/{process}/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def file_system(directory: str) -> str:
    """`/path on ext4, /dev/nvme0n1`: the mount with the longest matching path."""
    path = Path(directory).resolve()
    best, found = -1, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4].replace("\\040", " "))
        if path.is_relative_to(mount) and len(mount.parts) >= best:
            best, found = len(mount.parts), "{}, {}".format(*right.split()[:2])
    return f"{path} on {found}"


def commit() -> str:
    """The commit of the source, with `+` when tracked files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown (no git)"
