"""The file system of a directory, and the drives under it, as the kernel describes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SYS = Path("/sys")


@dataclass(frozen=True)
class Mount:
    """A mounted file system. `device`: major:minor; its major is 0 where the file system has no drive of its own."""

    point: str
    kind: str
    source: str
    options: frozenset[str]
    device: str


@dataclass(frozen=True)
class Drive:
    """A block device that is no partition and no volume: a RAID array is resolved to its members.

    `controller`: of NVMe, such as nvme0; else empty.
    """

    name: str
    model: str = ""
    rotates: bool = False
    numa_node: int | None = None
    controller: str = ""


def mount_of(directory: str, table: Path = MOUNTS) -> Mount | None:
    """The mount with the longest path that holds `directory`; None where the kernel has no such table."""
    path, best, found = Path(directory).resolve(), -1, None
    if not table.exists():
        return None
    for line in table.read_text("utf-8", "surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        _, _, device, _, point, own, *_ = left.split()
        kind, source, general = right.split(" ")[:3]  # a mount may have no source
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point)
        if path.is_relative_to(point) and len(Path(point).parts) >= best:
            best = len(Path(point).parts)
            found = Mount(point, kind, source, frozenset(f"{own},{general}".split(",")), device)
    return found


def drives_of(mount: Mount, sys: Path = SYS) -> list[Drive]:
    """The drives under `mount`, below its partitions and volumes; none where the kernel does not tell."""
    device = mount.device
    if device.startswith("0:"):  # btrfs and others have several devices, and name one of them as the source
        if not (mount.source.startswith("/dev/") and os.path.exists(mount.source)):
            return []
        number = os.stat(mount.source).st_rdev
        device = f"{os.major(number)}:{os.minor(number)}"
    node = sys / "dev" / "block" / device
    return [_drive(each) for each in _below(node.resolve())] if node.exists() else []


def _below(node: Path) -> Iterator[Path]:
    """The nodes of the drives that a partition or a volume (LVM, RAID, encryption) is on."""
    if (node / "partition").exists():
        node = node.parent
    slaves = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    for slave in slaves:
        yield from _below(slave.resolve())
    if not slaves:
        yield node


def _drive(node: Path) -> Drive:
    controller = re.match(r"(nvme\d+)(?:c\d+)?n\d+$", node.name)
    numa = text_of(node / "device" / "numa_node") or text_of(node / "device" / "device" / "numa_node")
    return Drive(
        name=node.name,
        model=text_of(node / "device" / "model"),
        rotates=text_of(node / "queue" / "rotational") == "1" and node.name.startswith("sd"),  # virtual ones say so too
        numa_node=int(numa) if numa and int(numa) >= 0 else None,
        controller=controller[1] if controller else "",
    )


def text_of(path: Path) -> str:
    """The contents of a file of the kernel's, "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
