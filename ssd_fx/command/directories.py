"""What `ssd-fx doctor` says of a directory: its file system, its drives, room, rates and wear."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ssd_fx import mounts
from ssd_fx.calibration import round_trip
from ssd_fx.command import limits, smart
from ssd_fx.command.findings import Finding
from ssd_fx.config import Config
from ssd_fx.runtime.engines.extents import beyond_the_reserve
from ssd_fx.runtime.engines.preflight import check_directory
from ssd_fx.runtime.errors import without_number
from ssd_fx.sizes import format_bytes

_LITTLE_ROOM = 8 << 30  # below it, the file of a model that needs offloading may not fit
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "virtiofs", "fuse")
_COPYING = ("btrfs", "zfs", "bcachefs")  # they write a changed block elsewhere
_QUOTAS = ("quota", "usrquota", "grpquota", "prjquota", "uquota", "gquota", "pquota")


def findings(directory: str) -> Iterator[Finding]:
    """The findings about `directory`; the last one is "bad" if activations cannot go there."""
    if found := unfit(directory, allow_tmpfs=Config.make().allow_tmpfs):
        yield found
        return
    mount = mounts.mount_of(directory)
    drives = mounts.drives_of(mount) if mount else []
    if mount:
        yield file_system(mount)
        yield from quota(mount)
    yield from map(_drive, drives)
    yield from limits.numa(drives)
    if mount:
        yield from limits.drives_in_groups([mount.device])
    yield room(os.statvfs(directory))
    yield from wear(drives)
    yield from rates(directory)


def unfit(directory: str, *, allow_tmpfs: bool) -> Finding | None:
    """Why activations cannot go to `directory`; None if they can."""
    try:
        check_directory(directory, allow_tmpfs=allow_tmpfs)
    except OSError as error:
        says, _, do = without_number(error).partition("; ")
        return Finding("directory", says, "bad", do)
    return None


def file_system(mount: mounts.Mount) -> Finding:
    """The kind of a file system, and whether it suits."""
    says, figures = f"{mount.kind} on {mount.source or 'none'}, mounted at {mount.point}", {"kind": mount.kind}
    if mount.kind == "overlay":
        right = "mount a directory of the host's drive into the container, as by docker's `-v /mnt/nvme:/mnt/nvme`"
        return Finding("file system", f"{says}: the container's own layer", "warn", right, figures)
    if mount.kind.split(".")[0] in _REMOTE:
        return Finding("file system", f"{says}: behind a network or a host", "warn", "name a local drive", figures)
    if mount.kind in _COPYING:
        right = f"ext4 or xfs suits better; on btrfs `chattr +C {mount.point}/DIR` of a new directory helps"
        return Finding("file system", f"{says}: copies what it overwrites", "warn", right, figures)
    return Finding("file system", says, figures=figures)


def quota(mount: mounts.Mount) -> Iterator[Finding]:
    """Whether quotas are on. Free space does not show them."""
    if found := sorted(mount.options.intersection(_QUOTAS)):
        right = "`quota -s` shows yours; the option disk_limit keeps the file below it"
        yield Finding("quota", f"{', '.join(found)} is on, which free space does not show", "warn", right)


def _drive(drive: mounts.Drive) -> Finding:
    says = " ".join(filter(None, (f"/dev/{drive.name}", drive.model)))
    if drive.rotates:
        return Finding("drive", f"{says}, which rotates", "warn", "name a directory on an NVMe drive", asdict(drive))
    return Finding("drive", says, figures=asdict(drive))


def room(status: os.statvfs_result) -> Finding:
    """The room that the file of activations may take."""
    free = max(0, beyond_the_reserve(status))
    figures = {"usable_bytes": free, "file_system_bytes": status.f_blocks * status.f_frsize}
    says = f"{format_bytes(free)} may be used; 1 GiB or 5% of the file system stay free"
    if free < _LITTLE_ROOM:
        right = "make room, or name more directories; what does not fit stays in memory"
        return Finding("room", says, "warn", right, figures)
    return Finding("room", says, figures=figures)


def wear(drives: Sequence[mounts.Drive]) -> Iterator[Finding]:
    """What the NVMe drives among `drives` say of their life. The rating in TBW is in no drive's log."""
    for drive in drives:
        if not drive.controller:
            says = f"/dev/{drive.name} is no NVMe drive that this system sees, so nothing is known of its life"
            yield Finding("wear", says, figures={"drive": drive.name})
            continue
        try:
            yield _worn(drive, smart.read(drive.controller))
        except OSError as error:
            says = f"/dev/{drive.controller} does not say ({error.strerror})"
            yield Finding("wear", says, do="run `ssd-fx doctor` as root, or `nvme smart-log`", figures={})


def _worn(drive: mounts.Drive, found: smart.Wear) -> Finding:
    says = f"/dev/{drive.controller}: {found.used_percent}% of its rated life used, "
    says += f"{found.written_bytes / 1e12:.1f} TB written so far, {found.spare_percent}% of its spare left"
    if found.endurance_bytes:
        says += f"; at that wear it takes about {found.endurance_bytes / 1e12:.0f} TB in all"
    figures = asdict(found) | {"drive": drive.name, "endurance_bytes": found.endurance_bytes}
    if found.media_errors or found.used_percent >= 90:
        says += f"; {found.media_errors} errors of the medium"
        return Finding("wear", says, "warn", "replace it before long; blocks are checked when they are read", figures)
    right = "the option drive_tbw takes its rating, which the data sheet has, and stats() then says how long it lasts"
    return Finding("wear", says, "ok", right, figures)


def rates(directory: str) -> Iterator[Finding]:
    """The measured rates, or why activations cannot be kept there."""
    space = os.statvfs(directory)
    failed, do, found = "", "make room, raise disk_limit, or name another directory", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            found = round_trip.measure(directory)
        except RuntimeError as error:
            failed = str(error)
        except OSError as error:
            free = format_bytes(space.f_bavail * space.f_frsize)
            failed = f"{error}; {free} were free there, of which 1 GiB or 5% of the file system stay free"
            if error.errno == errno.EIO:
                do = "do not use this drive; the kernel's log may say more of it (`dmesg`)"
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        yield Finding("warning", text, "warn")
    if failed:
        yield Finding("directory", failed, "bad", do)
    for name, (write, read) in zip(("file grows", "file reused"), found, strict=False):
        says = f"write {write / 1e6:7.0f} MB/s   read {read / 1e6:7.0f} MB/s"
        yield Finding(name, says, figures={"write_bytes_s": write, "read_bytes_s": read})
