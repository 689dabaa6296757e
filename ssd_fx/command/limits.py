"""What limits this process: its container, its cores beside the drives, and its shell."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ssd_fx.calibration import cache as rates_cache
from ssd_fx.command.findings import Finding
from ssd_fx.mounts import SYS, Drive, text_of
from ssd_fx.runtime.account import AUTO
from ssd_fx.runtime.memory.available import available_bytes, least_limit, own_groups
from ssd_fx.runtime.memory.gauge import gauge, host_spare_bytes
from ssd_fx.runtime.memory.numa import cores_in
from ssd_fx.runtime.memory.pinned import SHARE
from ssd_fx.sizes import format_bytes

ROOT = Path("/")


def findings() -> Iterator[Finding]:
    """The findings about the process, without its directories."""
    yield from memory()
    yield auto()
    if torch.cuda.is_available():
        integrated = bool(getattr(torch.cuda.get_device_properties(), "is_integrated", False))
        yield from pinned(integrated=integrated)
    yield from cpu_quota()
    yield from shell()
    yield from cache()


def memory(root: Path = ROOT) -> Iterator[Finding]:
    """The least memory that a control group allows."""
    with suppress(OSError):  # the kernel does not tell of control groups
        limit = least_limit(root)
        if limit is not None:
            says = f"the container allows {format_bytes(limit)} of memory, page cache included"
            yield Finding("memory", says, figures={"limit_bytes": limit})


def auto() -> Finding:
    """What the option memory="auto" would take now, on the device that models are trained on here."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    found = gauge(device) if device.type != "cpu" else None
    nbytes = int(AUTO * (found.spare_bytes() if found else host_spare_bytes()))
    says = f"memory='auto' would limit all tensors on {device.type} to {format_bytes(nbytes)} now"
    return Finding("auto", says, figures={"auto_bytes": nbytes})


def pinned(root: Path = ROOT, *, integrated: bool) -> Iterator[Finding]:
    """How much host memory tensors of a GPU may be copied to. `integrated`: the GPU has none of its own.

    Source of what is said of WSL: NVIDIA's "CUDA on WSL User Guide", "WSL 2 Support Constraints".
    """
    most = int(SHARE * available_bytes(root))
    says = f"{format_bytes(most)} may be pinned now, {SHARE:.0%} of what is free; ranks share it"
    yield Finding("pinned", says, figures={"pinned_bytes": most})
    if integrated:
        says = "this GPU has no memory but the host's, so a copy to host memory frees nothing"
        yield Finding("unified", says, "warn", "engine='posix', with a drive in dirs")
    if "microsoft" in text_of(root / "proc/sys/kernel/osrelease").lower():
        says = "Windows lets a GPU have only a part of the memory pinned"
        yield Finding("WSL", says, "warn", "a small host_budget, with a drive in dirs behind it")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY:
        says = f"{format_bytes(locked)} may be locked, and a driver may count pinned memory there"
        yield Finding("ulimit -l", says, do="ulimit -l unlimited, should pinning fail")


def cpu_quota(root: Path = ROOT) -> Iterator[Finding]:
    """Whether torch has more threads than the control group has time for."""
    quotas = [" ".join(map(text_of, files)).split() for files in _files("cpu", root)]
    allowed = min((int(q[0]) / int(q[1]) for q in quotas if len(q) == 2 and q[0].isdecimal()), default=None)
    threads = torch.get_num_threads()
    if allowed is not None and threads > allowed + 0.5:
        says = f"the container allows {allowed:g} cores, and torch uses {threads} threads, which wait for each other"
        yield Finding("cores", says, "warn", f"set OMP_NUM_THREADS={max(1, int(allowed))}", {"allowed": allowed})


def drives_in_groups(devices: Sequence[str], root: Path = ROOT) -> Iterator[Finding]:
    """Whether a control group slows a drive down. `devices`: numbers as major:minor."""
    for path in (path for files in _files("blkio", root) for path in files):
        for line in text_of(path).splitlines():
            device, _, limits = line.partition(" ")
            if device in devices:
                says = f"it limits this drive: {path.name} has {limits}"
                yield Finding("container", says, "warn", f"raise {path.name} in {path.parent}")


_FILES = {  # with the limits of a group, by controller and version of cgroups
    # The microseconds that a group may run, and the period that they are of; other words for no limit.
    ("cpu", 1): ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ("cpu", 2): ("cpu.max",),
    ("blkio", 1): tuple(f"blkio.throttle.{way}_{what}_device" for what in ("bps", "iops") for way in ("read", "write")),
    ("blkio", 2): ("io.max",),
}


def _files(controller: str, root: Path) -> list[list[Path]]:
    """The files with limits of each group of this process; none where the kernel has no control groups."""
    with suppress(OSError):
        groups = own_groups(controller, root)
        return [[group.folder / name for name in _FILES[controller, group.version]] for group in groups]
    return []


def shell() -> Iterator[Finding]:
    """Limits that `ulimit` sets."""
    addresses, largest = (resource.getrlimit(what)[0] for what in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    if addresses != resource.RLIM_INFINITY:
        says = f"addresses are limited to {format_bytes(addresses)}, so ssd_fx's own allocator stays off"
        yield Finding("ulimit -v", says, "warn", "ulimit -v unlimited")
    if largest != resource.RLIM_INFINITY:
        says = f"a file may have {format_bytes(largest)}, and ssd_fx has one file per directory"
        yield Finding("ulimit -f", says, "warn", "ulimit -f unlimited")


def cache() -> Iterator[Finding]:
    """Whether measured rates and built libraries can be kept."""
    try:
        path = rates_cache.path().parent
        above = next(each for each in (path, *path.parents) if os.path.exists(each))  # Path's raises in a closed home
        wrong = "" if os.access(above, os.W_OK | os.X_OK) else f"{path} cannot be written"
    except FileNotFoundError as error:
        wrong = str(error)
    if wrong:
        says = f"{wrong}, so every process measures the machine"
        yield Finding("cache", says, "warn", "set XDG_CACHE_HOME to a directory that can be written")


def numa(drives: Sequence[Drive], sys: Path = SYS) -> Iterator[Finding]:
    """Whether this process may run on cores that are far from a drive."""
    nodes = {int(each.name[4:]): each for each in (sys / "devices" / "system" / "node").glob("node[0-9]*")}
    own = os.sched_getaffinity(0)
    far = {drive.numa_node for drive in drives} - {None}
    if len(nodes) < 2 or not far:
        return
    near = set().union(*(cores_in(text_of(nodes[node] / "cpulist")) for node in far if node in nodes))
    if not own <= near:
        names = ",".join(map(str, sorted(node for node in far if node is not None)))
        says = f"the drives are on NUMA node {names}, and this process may run on others too"
        yield Finding(
            "NUMA", says, "warn", f"numactl --cpunodebind={names} --preferred={names.split(',')[0]} python ..."
        )
