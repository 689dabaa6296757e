"""The memory that is free, within the limits of the process's cgroups: of version 1, of version 2, in a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ssd_fx.runtime.memory.available import available_bytes, data_bytes, own_groups, total_bytes

GIB = 1 << 30
AVAILABLE = f"MemTotal: {64 * 1024 * 1024} kB\nMemAvailable: {32 * 1024 * 1024} kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """32 GiB are available, and there are no cgroups."""
    put(tmp_path, "proc/meminfo", AVAILABLE)
    put(tmp_path, "proc/self/cgroup", "")
    return tmp_path


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def group_v2(root: Path, group: str, limit: str, usage: int, cache: int = 0) -> None:
    put(root, f"sys/fs/cgroup{group}/memory.max", f"{limit}\n")
    put(root, f"sys/fs/cgroup{group}/memory.current", f"{usage}\n")
    put(root, f"sys/fs/cgroup{group}/memory.stat", f"anon 1\ninactive_file {cache}\n")


def test_without_a_cgroup(machine: Path) -> None:
    assert available_bytes(machine) == 32 * GIB


def test_a_kernel_without_cgroups_limits_nothing(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", AVAILABLE)
    assert (available_bytes(tmp_path), total_bytes(tmp_path)) == (32 * GIB, 64 * GIB)


def test_what_cannot_be_told_is_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 0
    put(tmp_path, "proc/self/cgroup", "")
    put(tmp_path, "proc/meminfo", "MemTotal: 1 kB\n")
    assert available_bytes(tmp_path) == 0


def test_version_2(machine: Path) -> None:
    """Files that were read and are not in use can be dropped."""
    put(machine, "proc/self/cgroup", "0::/user/job\n")
    group_v2(machine, "/user/job", str(8 * GIB), 6 * GIB, cache=GIB)
    assert available_bytes(machine) == 3 * GIB


def test_the_group_around_has_the_lower_limit(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "0::/user/job\n")
    group_v2(machine, "/user", str(4 * GIB), 2 * GIB)
    group_v2(machine, "/user/job", "max", 2 * GIB)
    assert available_bytes(machine) == 2 * GIB


def test_a_container_sees_its_group_as_the_top(machine: Path) -> None:
    """The path is that of the host, and the files are at the top."""
    put(machine, "proc/self/cgroup", "0::/system/docker-1\n")
    group_v2(machine, "", str(5 * GIB), GIB)
    assert available_bytes(machine) == 4 * GIB


def test_version_1(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "5:cpu:/other\n4:memory:/job\n0::/\n")
    folder = "sys/fs/cgroup/memory/job"
    put(machine, f"{folder}/memory.limit_in_bytes", f"{8 * GIB}\n")
    put(machine, f"{folder}/memory.usage_in_bytes", f"{7 * GIB}\n")
    put(machine, f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n")
    put(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")  # no limit
    put(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{7 * GIB}\n")
    put(machine, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n")
    assert available_bytes(machine) == 3 * GIB // 2


def test_tables_that_read_otherwise(machine: Path) -> None:
    """A blank line is passed over; a group whose files say no number does not count."""
    put(machine, "proc/self/cgroup", "\n0::/user/job\n")
    group_v2(machine, "/user", str(8 * GIB), 6 * GIB)
    put(machine, "sys/fs/cgroup/user/memory.stat", f"anon 1\n\nfile\ninactive_file {GIB}\n")
    group_v2(machine, "/user/job", "", 0)
    assert available_bytes(machine) == 3 * GIB
    put(machine, "proc/meminfo", "MemAvailable: much\n")
    assert available_bytes(machine) == 0


def test_groups_of_a_controller(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "5:cpu,cpuacct:/a/b\n4:memory:/c\n0::/d\n")
    found = [
        (str(group.folder.relative_to(machine / "sys/fs/cgroup")), group.version)
        for group in own_groups("cpu", machine)
    ]
    assert found == [("cpu/a/b", 1), ("cpu/a", 1), ("cpu", 1), ("d", 2), (".", 2)]


def test_over_the_limit(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "0::/job\n")
    group_v2(machine, "/job", str(GIB), 2 * GIB)
    assert available_bytes(machine) == 0


def test_this_machine() -> None:
    """No more than there is, and not a thousandth of it."""
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert there_is / 1000 < available_bytes() < there_is


def test_what_the_process_could_have(machine: Path) -> None:
    assert total_bytes(machine) == 64 * GIB
    put(machine, "proc/self/cgroup", "0::/user/job\n")
    group_v2(machine, "/user", str(4 * GIB), 2 * GIB)
    group_v2(machine, "/user/job", "max", 2 * GIB)
    assert total_bytes(machine) == 4 * GIB


def test_what_the_limit_of_data_counts(machine: Path) -> None:
    assert data_bytes(machine) == 0, "the kernel does not tell"
    put(machine, "proc/self/status", "Name: python\nVmData:\t  2048 kB\n")
    assert data_bytes(machine) == 2 << 20
