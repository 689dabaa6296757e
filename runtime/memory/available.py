"""How much host memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 62  # version 1 says 2**63 rounded down to a page


class Group(NamedTuple):
    """A cgroup of this process, or one that holds it. `version`: 1 or 2."""

    folder: Path
    version: int


class _Files(NamedTuple):
    """The files in which a version of Linux's cgroups tells about the memory of a group."""

    limit: str
    usage: str
    cache: str  # in memory.stat: bytes of files that can be dropped


_FILES = {
    1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Files("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int:
    """The host memory that nobody uses, within the limits of this process's cgroups; 0 if that cannot be told.

    `root`: the folder that holds `proc` and `sys`. Source: "Memory" in Linux's admin-guide/cgroup-v2.rst, and
    cgroup-v1/memory.rst.
    """
    try:
        available = 1024 * _field(root / "proc/meminfo", "MemAvailable:")
        left = map(_left_in, own_groups("memory", root))
        return max(0, min([available, *(each for each in left if each is not None)]))
    except (OSError, ValueError):
        return 0


def total_bytes(root: Path = Path("/")) -> int:
    """The host memory that this process could have, were it alone: of the machine, within the limits of its cgroups.

    Raises:
        OSError, ValueError: the kernel does not tell.
    """
    machine = _field(root / "proc/meminfo", "MemTotal:") * 1024
    limit = least_limit(root)
    return machine if limit is None else min(machine, limit)


def least_limit(root: Path = Path("/")) -> int | None:
    """The bytes that this process's cgroups allow; None for no limit, as of a kernel without cgroups.

    Raises:
        OSError: the kernel does not tell.
    """
    limits = []
    for group in own_groups("memory", root):
        try:
            limits.append(memory_limit(group))
        except (OSError, ValueError):  # a group that a container does not see
            continue
    return min((limit for limit in limits if limit is not None), default=None)


def data_bytes(root: Path = Path("/")) -> int:
    """What `RLIMIT_DATA` counts of this process; 0 if the kernel does not tell."""
    try:
        return _field(root / "proc/self/status", "VmData:") * 1024
    except (OSError, ValueError):
        return 0


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """The cgroups with `controller` ("memory", "cpu", ...) of this process, and those above them; some may not exist.

    A kernel that was built without cgroups has none.

    Raises:
        OSError: the kernel does not tell.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        version = 2 if number == "0" else 1
        top = root / "sys/fs/cgroup" / (controller if version == 1 else "")
        innermost = top / path.lstrip("/")
        for folder in (innermost, *innermost.parents):
            yield Group(folder, version)
            if folder == top:
                break


def memory_limit(group: Group) -> int | None:
    """The bytes that a group may have; None for no limit.

    Raises:
        OSError: there is no such group, as for one that a container does not see.
        ValueError: the kernel's file has something else.
    """
    text = (group.folder / _FILES[group.version].limit).read_text().strip()
    return None if text == "max" or int(text) >= _NO_LIMIT else int(text)


def _left_in(group: Group) -> int | None:
    """The bytes left in one group; None for no limit, and where that cannot be told."""
    files = _FILES[group.version]
    try:
        limit = memory_limit(group)
        if limit is None:
            return None
        usage = int((group.folder / files.usage).read_text())
        return limit - usage + _field(group.folder / "memory.stat", files.cache)
    except (OSError, ValueError):
        return None


def _field(table: Path, name: str) -> int:
    """The number in the line of `table` that begins with `name`; 0 if there is none."""
    rows = (line.split() for line in table.read_text().splitlines())
    return next((int(row[1]) for row in rows if len(row) > 1 and row[0] == name), 0)
