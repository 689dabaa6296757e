"""File systems and drives, of a kernel's tables that are written here."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ssd_fx import mounts
from ssd_fx.command import directories, limits

TABLE = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:25 / /ram rw,nosuid - tmpfs tmpfs rw
31 22 252:0 / /mnt/my\040drive rw,noatime shared:3 - xfs /dev/mapper/fast rw,prjquota
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "mountinfo").write_text(TABLE.lstrip())
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("path", "kind"), [("/srv/run", "ext4"), ("/ram/x", "tmpfs"), ("/mnt/my drive/run", "xfs"), ("/ramx", "ext4")]
)
def test_the_mount_with_the_longest_path(path: str, kind: str, table: Path) -> None:
    found = mounts.mount_of(path, table)
    assert found is not None
    assert found.kind == kind


def test_a_mount_without_a_source(table: Path) -> None:
    with table.open("a") as file:
        file.write("40 22 0:40 / /bare rw,relatime - tmpfs  rw,noswap\n")
    assert mounts.mount_of("/srv", table) is not None
    found = mounts.mount_of("/bare", table)
    assert found is not None
    assert (found.kind, found.source) == ("tmpfs", "")
    assert "noswap" in found.options
    assert directories.file_system(found).says == "tmpfs on none, mounted at /bare"


def test_a_mount_point_of_another_encoding(table: Path) -> None:
    """Someone else's mount in Latin-1 must not end the search for ours; and ours may be that one."""
    with table.open("ab") as file:
        file.write(b"40 22 8:1 / /media/caf\xe9 rw - vfat /dev/sdb1 rw\n")
    for path, kind in (("/srv", "ext4"), (os.fsdecode(b"/media/caf\xe9/run"), "vfat")):
        found = mounts.mount_of(path, table)
        assert found is not None
        assert found.kind == kind


def test_both_lists_of_options(table: Path) -> None:
    found = mounts.mount_of("/mnt/my drive", table)
    assert found is not None
    assert {"noatime", "prjquota"} <= found.options


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """An NVMe drive with a partition, a second one, and a volume over both."""
    root = tmp_path / "sys"
    for number, name in enumerate(("nvme0n1", "nvme1n1")):
        drive = root / "devices" / name
        (drive / "queue").mkdir(parents=True)
        (drive / "queue" / "rotational").write_text("0\n")
        (drive / "device").mkdir()
        (drive / "device" / "model").write_text(f"Fast {number}   \n")
        (drive / "device" / "numa_node").write_text(f"{number}\n")
    partition = root / "devices" / "nvme0n1" / "nvme0n1p2"
    partition.mkdir()
    (partition / "partition").write_text("2\n")
    volume = root / "devices" / "dm-0"
    (volume / "slaves").mkdir(parents=True)
    (volume / "slaves" / "nvme0n1p2").symlink_to(partition)
    (volume / "slaves" / "nvme1n1").symlink_to(root / "devices" / "nvme1n1")
    block = root / "dev" / "block"
    block.mkdir(parents=True)
    (block / "259:2").symlink_to(partition)
    (block / "252:0").symlink_to(volume)
    return root


def test_the_drive_of_a_partition(table: Path, sys: Path) -> None:
    mount = mounts.mount_of("/srv", table)
    assert mount is not None
    assert mounts.drives_of(mount, sys) == [mounts.Drive("nvme0n1", "Fast 0", False, 0, "nvme0")]


def test_the_drives_of_a_volume(table: Path, sys: Path) -> None:
    mount = mounts.mount_of("/mnt/my drive", table)
    assert mount is not None
    assert [drive.controller for drive in mounts.drives_of(mount, sys)] == ["nvme0", "nvme1"]


def test_a_file_system_without_a_drive(table: Path, sys: Path) -> None:
    mount = mounts.mount_of("/ram/x", table)
    assert mount is not None
    assert mounts.drives_of(mount, sys) == []


def stand_on(table: Path, directory: Path, device: str, source: str = "/dev/x") -> str:
    """The directory, after a line in the table that mounts it from `device`."""
    with table.open("a") as file:
        file.write(f"50 22 {device} / {directory} rw - ext4 {source} rw\n")
    return str(directory)


def test_a_drive_has_one_name_whatever_its_number(table: Path, sys: Path, tmp_path: Path) -> None:
    """Numbers are given out at every start of a machine; and a partition is called as the drive that it is on."""
    here = stand_on(table, tmp_path, "259:2")
    put(sys / "devices", {"nvme0n1/wwid": "eui.0001\n", "nvme1n1/wwid": "eui.0002\n"})
    assert mounts.name_of(here, table, sys) == "eui.0001"
    (sys / "dev" / "block" / "259:2").unlink()
    (sys / "dev" / "block" / "259:2").symlink_to(sys / "devices" / "nvme1n1")
    assert mounts.name_of(here, table, sys) == "eui.0002"


def test_the_name_of_a_volume(table: Path, sys: Path, tmp_path: Path) -> None:
    """Its own, since encryption takes time that the drive alone does not; else all those of its drives."""
    here = stand_on(table, tmp_path, "252:0")
    put(sys / "devices", {"nvme0n1/wwid": "eui.0001\n", "nvme1n1/wwid": "t10.ATA   Fast  1\n"})
    assert mounts.name_of(here, table, sys) == f"eui.0001+{socket.gethostname()} t10.ATA Fast 1"
    put(sys / "devices", {"dm-0/dm/uuid": "CRYPT-LUKS2-abc\n"})
    assert mounts.name_of(here, table, sys) == "CRYPT-LUKS2-abc"


def test_a_name_that_other_hosts_may_give_too(
    table: Path, sys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drives of virtual machines often share a serial number, and a network file system has none."""
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    here = stand_on(table, tmp_path, "259:2")
    number = os.stat(here).st_dev
    assert mounts.name_of(here, table, sys) == f"node7 {os.major(number)}:{os.minor(number)}"
    put(sys / "devices", {"nvme0n1/serial": "drive-0\n"})
    assert mounts.name_of(here, table, sys) == "node7 drive-0"
    assert mounts.name_of(here, tmp_path / "no table", sys) == f"node7 {os.major(number)}:{os.minor(number)}"
    with pytest.raises(FileNotFoundError):
        mounts.name_of(str(tmp_path / "missing"), table, sys)


def test_a_drive_that_is_far_from_the_cores(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in enumerate(("0-1,4", "2-3")):
        folder = sys / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores)
    drive = [mounts.Drive("nvme1n1", numa_node=1)]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2})
    (found,) = limits.numa(drive, sys)
    assert found.says == "the drives are on NUMA node 1, and this process may run on others too"
    assert found.do.startswith("numactl --cpunodebind=1 ")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3})
    assert list(limits.numa(drive, sys)) == []


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2 = {
    "proc/self/cgroup": "0::/pod/run\n",
    "sys/fs/cgroup/pod/run/memory.max": "max\n",
    "sys/fs/cgroup/pod/memory.max": f"{3 << 30}\n",
    "sys/fs/cgroup/pod/run/cpu.max": "200000 100000\n",
    "sys/fs/cgroup/pod/run/io.max": "259:0 rbps=max wbps=1048576 riops=max wiops=max\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/pod/run\n3:cpu,cpuacct:/pod/run\n2:blkio:/pod/run\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{3 << 30}\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/pod/run/cpu.cfs_quota_us": "200000\n",
    "sys/fs/cgroup/cpu/pod/run/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/blkio/pod/run/blkio.throttle.write_bps_device": "259:0 1048576\n",
}


@pytest.mark.parametrize(
    ("files", "slows"), [(V2, "io.max has rbps=max wbps=1048576"), (V1, "write_bps_device has 1048576")]
)
def test_limits_of_a_container(
    files: dict[str, str], slows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, files)
    (memory,) = limits.memory(tmp_path)
    assert memory.figures == {"limit_bytes": 3 << 30}
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    (cores,) = limits.cpu_quota(tmp_path)
    assert cores.do == "set OMP_NUM_THREADS=2"
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert list(limits.cpu_quota(tmp_path)) == []
    (slow,) = limits.drives_in_groups(["259:0"], tmp_path)
    assert slows in slow.says
    assert list(limits.drives_in_groups(["259:1"], tmp_path)) == []


def test_a_kernel_that_tells_of_no_groups(tmp_path: Path) -> None:
    assert list(limits.memory(tmp_path)) == []
    put(tmp_path, {"proc/self/cgroup": "4:memory:/\n0::/\n"})
    put(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"})
    assert list(limits.memory(tmp_path)) == []


@pytest.mark.parametrize(
    ("integrated", "release", "locked", "subjects"),
    [
        (False, "6.8.0-generic", -1, []),
        (True, "6.8.0-tegra", -1, ["unified"]),
        (False, "5.15.167.4-microsoft-standard-WSL2", 8 << 20, ["WSL", "ulimit -l"]),
    ],
)
def test_what_may_be_pinned(
    integrated: bool, release: str, locked: int, subjects: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    put(tmp_path, {"proc/meminfo": f"MemAvailable: {4 << 20} kB\n", "proc/sys/kernel/osrelease": f"{release}\n"})
    put(tmp_path, {"proc/self/cgroup": "0::/\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (locked, -1))
    share, *others = limits.pinned(tmp_path, integrated=integrated)
    assert share.figures == {"pinned_bytes": 3 << 30}
    assert [each.subject for each in others] == subjects


@pytest.mark.parametrize(("what", "subject"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_FSIZE", "ulimit -f")])
def test_limits_of_the_shell(what: str, subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limited = getattr(resource, what)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30 if kind == limited else -1, -1))
    (found,) = limits.shell()
    assert (found.subject, found.status) == (subject, "warn")
    assert "1 GiB" in found.says
