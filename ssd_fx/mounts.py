"""The file system of a directory, and the drives under it, as the kernel describes them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
SYS = Path("/sys")
_IDENTITIES = ("wwid", "device/wwid", "dm/uuid", "md/uuid")  # files below a block device; mostly no two have the same


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
    node = _node(mount, sys)
    return [_drive(each) for each in _below(node)] if node else []


def name_of(directory: str, table: Path = MOUNTS, sys: Path = SYS) -> str:
    """What the drive or the volume under `directory` is called on every machine, and after every start of one.

    That is the WWID of a drive, or the UUID of a volume. A serial number need not be the only one of its kind, so the
    name of the host stands before it. Where the kernel tells of neither, as for a network file system, it is the name
    of the host and the number of the device.

    Raises:
        OSError: there is no such directory.
    """
    number = os.stat(directory).st_dev
    mount = mount_of(directory, table)
    node = _node(mount, sys) if mount else None
    found = _identity(node) if node else ""
    return found or f"{socket.gethostname()} {os.major(number)}:{os.minor(number)}"


def _identity(node: Path) -> str:
    """What tells a block device from all others: its own name, or those of what it is made of; empty without one."""
    node = _whole(node)
    for file in _IDENTITIES:
        if found := " ".join(text_of(node / file).split()):
            # such a name has the vendor's serial number in it, and virtual machines give all drives the same
            return f"{socket.gethostname()} {found}" if found.startswith("t10.") else found
    if serial := text_of(node / "serial"):
        return f"{socket.gethostname()} {serial}"
    parts = [_identity(each) for each in _members(node)]
    return "+".join(parts) if all(parts) else ""


def _node(mount: Mount, sys: Path) -> Path | None:
    """The kernel's folder of the block device that is mounted; None where it has none."""
    device = mount.device
    if device.startswith("0:"):  # btrfs and others have several devices, and name one of them as the source
        if not (mount.source.startswith("/dev/") and os.path.exists(mount.source)):
            return None
        number = os.stat(mount.source).st_rdev
        device = f"{os.major(number)}:{os.minor(number)}"
    node = sys / "dev" / "block" / device
    return node.resolve() if node.exists() else None


def _below(node: Path) -> Iterator[Path]:
    """The nodes of the drives that a partition or a volume (LVM, RAID, encryption) is on."""
    node = _whole(node)
    members = _members(node)
    for member in members:
        yield from _below(member)
    if not members:
        yield node


def _whole(node: Path) -> Path:
    """The node of the drive that a partition is of, or else the node itself."""
    return node.parent if (node / "partition").exists() else node


def _members(node: Path) -> list[Path]:
    """The nodes that a volume is made of; none for a drive."""
    slaves = node / "slaves"
    return [each.resolve() for each in sorted(slaves.iterdir())] if slaves.is_dir() else []


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
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
