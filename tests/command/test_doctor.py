"""What `ssd-fx doctor` says of this machine and of directories, good and bad."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import ssd_fx
from ssd_fx import cli, mounts
from ssd_fx.calibration import cache, round_trip
from ssd_fx.calibration.cache import Entry
from ssd_fx.command import limits, smart, software
from ssd_fx.command.directories import file_system, quota, room, wear
from ssd_fx.command.findings import Finding, summary, worst
from ssd_fx.options import Options
from ssd_fx.runtime.engines.base import Completion, Extent, Memory
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.runtime.native import loader
from tests.runtime.engines import Wrapped
from tests.runtime.harness import directories


def doctor(*words: object) -> int:
    return cli.main(["doctor", *map(str, words)])


def test_the_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_MIN_BYTES", "2MiB")
    assert doctor() == 0
    out = capsys.readouterr().out
    assert f"ssd_fx      {ssd_fx.__version__}, torch 2." in out
    assert "the environment sets " in out
    assert "min_bytes=2097152" in out


def test_a_good_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path) == 0
    out = capsys.readouterr().out
    assert re.search(r"^file grows +write +\d+ MB/s   read +\d+ MB/s$", out, re.MULTILINE)
    assert re.search(r"^file reused +write +\d+ MB/s   read +\d+ MB/s$", out, re.MULTILINE)
    assert re.search(r"^file system (WARN: )?\w+ on ", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(tmp_path, tmp_path / "missing", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "bad"
    good, missing = found["directories"].values()
    assert [each["status"] for each in missing] == ["bad"]
    measured = {each["subject"]: each["figures"] for each in good}["file reused"]
    assert 1e5 < measured["write_bytes_s"] < 1e12


def test_an_unfit_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(software, "findings", lambda _: ())
    monkeypatch.setattr(limits, "findings", lambda: ())
    assert doctor(tmp_path / "file") == 1
    out = capsys.readouterr().out
    assert f"directory   BAD: {tmp_path / 'file'}: activations need a directory, and this is something else" in out
    assert out.endswith("\n\n1 bad\n")
    assert "Errno" not in out


def test_a_directory_that_does_not_exist_is_all_that_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(tmp_path, tmp_path / "missing") == 1
    out, err = capsys.readouterr()
    right = "the directory for activations does not exist; create it on an NVMe drive"
    assert (out, err) == ("", f"ssd-fx: {tmp_path / 'missing'}: {right}\n")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_default_directories_that_do_not_exist(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_FX_DIRS", f"{tmp_path}:{tmp_path / 'missing'}")
    monkeypatch.setenv("SSD_FX_ENGINE", "posix")
    assert doctor(*words) == 1
    said = "directory   BAD: " if not words else '"says": "'
    assert f"{said}{tmp_path / 'missing'}: the directory for activations does not exist" in capsys.readouterr().out


def test_findings_are_printed_as_they_come(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take seconds, and Ctrl-C takes none of those before away."""

    def found(_: object) -> Iterator[Finding]:
        yield Finding("first", "is there")
        raise KeyboardInterrupt

    monkeypatch.setattr(software, "findings", found)
    assert doctor() == 130
    assert capsys.readouterr().out == "first       is there\n"


def test_how_many_are_bad() -> None:
    warns, bad = Finding("a", "", "warn"), Finding("b", "", "bad")
    assert [summary(each) for each in ([], [warns], [warns, warns], [bad, warns])] == [
        "all is well", "1 warning", "2 warnings", "1 bad, 1 warning",
    ]  # fmt: skip


def test_rates_that_were_never_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is not well where only the drives were measured; and nobody reads JSON."""
    monkeypatch.setenv("SSD_FX_MACHINE", "auto")
    monkeypatch.setenv("SSD_FX_ENGINE", "posix")
    config = Options(dirs=(str(tmp_path),), engine="posix")
    disk = Entry({"write_bw": 1.5e9, "drag_s_per_byte": 2.69e-10})
    monkeypatch.setattr(cache, "read", lambda: {cache.disk_key(config, torch.device("cpu")): disk})
    here = [str(tmp_path)]
    measured, missing = software._rates(here)
    assert f"{tmp_path} by engine posix\n            drives, write              1,500 MB/s\n" in str(measured)
    assert str(measured).endswith(" 269 ms per GB")
    assert max(map(len, str(measured).splitlines())) <= 120
    assert missing.status == "warn"
    assert re.match(r"those of compute \(\d+ threads?, torch .+\) are typical ones", missing.says)
    assert missing.do.startswith("`ssd-fx calibrate DIR...` measures them")
    monkeypatch.setenv("SSD_FX_MACHINE", "default")
    assert [each.subject for each in software._rates(here)] == ["disk"]


def test_rates_of_a_stripe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several directories are taken for one stripe, whose rates are not those of each drive."""
    both = directories(tmp_path, 2)
    monkeypatch.setattr(mounts, "name_of", lambda path: path)
    monkeypatch.setenv("SSD_FX_ENGINE", "posix")
    cpu = torch.device("cpu")
    compute = {cache.compute_key(cpu): Entry({"flops": 2e11})}
    keys = [cache.disk_key(Options(dirs=dirs, engine="posix"), cpu) for dirs in ((both[0],), (both[1],), tuple(both))]
    alone, other, stripe = ({key: Entry({"write_bw": 1.5e9})} for key in keys)
    monkeypatch.setenv("SSD_FX_MACHINE", "auto")
    monkeypatch.setattr(cache, "read", lambda: compute | stripe)
    assert [each.status for each in software._rates(both)] == ["ok", "ok"]
    monkeypatch.setattr(cache, "read", lambda: compute | alone | other)
    *_, missing = software._rates(both)
    assert missing.says.startswith(f"those of {both[0]} {both[1]} by engine posix are typical ones")
    assert missing.do.startswith("`ssd-fx calibrate DIR...` measures them")


def test_rates_of_other_machines_and_directories_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has those of every number of threads and of every version of torch that there ever was."""
    monkeypatch.setenv("SSD_FX_MACHINE", "default")
    cpu = torch.device("cpu")
    config = Options(dirs=(str(tmp_path),))
    kept = {key: Entry({"write_bw": 1.5e9}) for key in (cache.disk_key(config, cpu), cache.compute_key(cpu))}
    kept |= {key.replace('"cores": ', f'"cores": {i}'): entry for key, entry in kept.items() for i in range(1, 9)}
    monkeypatch.setattr(cache, "read", lambda: kept)
    compute, disk, others = software._rates([str(tmp_path), str(tmp_path / "missing")])
    assert (compute.subject, disk.subject, others.subject) == ("compute", "disk", "rates")
    assert others.says.startswith("16 more are kept, of other directories, threads, options or versions: ")


def test_rates_that_cannot_be_read_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no warning that ssd_fx measures again, for doctor measures nothing."""
    (tmp_path / "ssd_fx").mkdir()
    (tmp_path / "ssd_fx" / "machine.json").write_text('{"version": 1}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = next(software._rates(()))
    assert (found.subject, found.status) == ("rates", "warn")
    assert found.says.endswith(f"machine.json is of no use (not version {cache._VERSION} of the machine's rates)")


def test_a_home_that_this_user_may_not_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under sudo to another user: even to ask what is there is refused."""
    looks = os.stat

    def refuses(path: Any, *words: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return looks(path, *words, **named)

    monkeypatch.setattr(os, "stat", refuses)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (found,) = limits.cache()
    assert found.says == f"{tmp_path}/home/ssd_fx cannot be written, so every process measures the machine"


def test_without_a_pool_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("no pool")

    monkeypatch.setattr(loader, "library", missing)
    assert doctor() == 1
    assert "I/O threads BAD: no pool\n            -> install gcc" in capsys.readouterr().out
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "ssd-fx: no pool\n"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd_fx.compat.inductor.get_cpp_compiler", lambda: "/no/such/g++")
    found = software._compiler()
    assert (found.status, found.subject) == ("bad", "compiler")
    assert "/no/such/g++" in found.says


def test_a_directory_that_does_not_take_it_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not go there stays in memory, whose rates would be printed."""
    monkeypatch.setenv("SSD_FX_DISK_LIMIT", "32MiB")
    assert doctor(tmp_path) == 1
    out = capsys.readouterr().out
    assert "MB/s" not in out.split(f"\n{tmp_path}\n")[1]
    assert f"disk_limit is {32 << 20} B" in out
    assert "BAD: of 256 MiB only 32 MiB went to the drive and came back; " in out
    assert re.search(r"; [\d.]+ [GM]iB were free there, of which 1 GiB or 5% of the file system stay free\n", out)


def test_all_is_written_whatever_the_environment_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BUDGET": "1TiB", "HOST_BUDGET": "1TiB", "COMPRESSION": "bitpack"}.items():
        monkeypatch.setenv(f"SSD_FX_{name}", value)
    round_trip.measure(str(tmp_path), passes=1)
    assert ssd_fx.stats().written_bytes == ssd_fx.stats().read_bytes == 256 << 20


def test_a_directory_that_cannot_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "load of slot 0 failed 3 times", str(tmp_path))

    monkeypatch.setattr(round_trip, "round_trip", fails)
    assert doctor(tmp_path) == 1
    out = capsys.readouterr().out
    assert "BAD: [Errno 5] load of slot 0 failed 3 times" in out
    assert "-> do not use this drive" in out


class Misreading(Wrapped):
    """The first read after a write finds what was written last, whose checksums are right."""

    latest: Extent | None = None

    def write(self, extent: Extent, memory: Memory) -> Completion:
        self.latest = extent
        return super().write(extent, memory)

    def read(self, extent: Extent, memory: Memory) -> Completion:
        found, self.latest = self.latest or extent, None
        return super().read(found, memory)


def test_a_drive_that_returns_other_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    posix = ENGINES["posix"]
    monkeypatch.setitem(ENGINES, "posix", lambda config: Misreading(posix(config)))
    assert doctor(tmp_path) == 1
    out = capsys.readouterr().out
    assert "what was read is not what was written" in out
    assert "-> do not use this drive" in out
    assert "make room" not in out.split("what was read")[1]


def test_a_file_system_cannot_compress_what_is_written() -> None:
    tensors = round_trip._incompressible()
    start = b"".join(tensor[:65536].numpy().tobytes() for tensor in tensors)
    assert len(zlib.compress(start)) > 0.99 * len(start)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(tensors, 2))


def test_a_read_only_file_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no matter of permissions, though access(2) says no as well."""

    def refuses(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor(tmp_path) == 1
    found = re.search(r"BAD: .+: this file system is mounted read-only\n +-> (.+)", capsys.readouterr().out)
    assert found
    assert found[1] == "name a directory on a drive that can be written to"


def mounted(kind: str, *options: str) -> mounts.Mount:
    return mounts.Mount("/mnt", kind, "/dev/x", frozenset(options), "8:1")


@pytest.mark.parametrize(
    ("kind", "says", "do"),
    [
        ("overlay", "the container's own layer", "mount a directory of the host's drive"),
        ("nfs4", "behind a network or a host", "name a local drive"),
        ("fuse.sshfs", "behind a network or a host", "name a local drive"),
        ("btrfs", "copies what it overwrites", "ext4 or xfs"),
        ("ext4", "", ""),
    ],
)
def test_file_systems_that_do_not_suit(kind: str, says: str, do: str) -> None:
    found = file_system(mounted(kind))
    assert found.status == ("warn" if says else "ok")
    assert found.says.startswith(f"{kind} on /dev/x, mounted at /mnt")
    assert says in found.says
    assert found.do.startswith(do)


def test_quotas() -> None:
    (found,) = quota(mounted("xfs", "rw", "prjquota"))
    assert (found.status, found.says) == ("warn", "prjquota is on, which free space does not show")
    assert list(quota(mounted("xfs", "rw", "noquota"))) == []


@pytest.mark.parametrize(("free_gib", "status", "says"), [(7.0, "warn", "6 GiB may"), (40.0, "ok", "39 GiB may")])
def test_room(free_gib: float, status: str, says: str) -> None:
    free, block = int(free_gib * 2**30) // 4096, 4096
    found = room(os.statvfs_result((block, block, 2**26, free, free, 0, 0, 0, 0, 255)))
    assert found.status == status
    assert found.says.startswith(says)
    assert found.figures["usable_bytes"] == free * block - 2**30


DRIVE = mounts.Drive("nvme0n1", "Fast 1TB", controller="nvme0")


@pytest.mark.parametrize(
    ("worn", "status", "says"),
    [
        (smart.Wear(18 * 10**12, 3, 100, 0), "ok", "3% of its rated life used, 18.0 TB written so far, 100% of its"),
        (smart.Wear(18 * 10**12, 3, 100, 0), "ok", "; at that wear it takes about 600 TB in all"),
        (smart.Wear(600 * 10**12, 95, 40, 2), "warn", "; 2 errors of the medium"),
    ],
)
def test_wear(worn: smart.Wear, status: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smart, "read", lambda _: worn)
    (found,) = wear([DRIVE])
    assert found.status == status
    assert says in found.says


def test_wear_that_only_root_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: str) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", "/dev/nvme0")

    monkeypatch.setattr(smart, "read", refuses)
    (found,) = wear([DRIVE])
    assert found.says == "/dev/nvme0 does not say (Permission denied)"
    assert "as root" in found.do


def test_what_is_no_nvme_drive() -> None:
    (found,) = wear([mounts.Drive("vda")])
    assert "nothing is known of its life" in found.says


def test_the_worst_counts() -> None:
    assert worst([Finding("a", ""), Finding("b", "", "warn")]) == "warn"
    assert worst([Finding("a", "", "bad"), Finding("b", "", "warn")]) == "bad"
    assert worst([]) == "ok"


def test_what_the_option_memory_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_spare_bytes", lambda: 100 << 30)
    found = limits.auto()
    assert str(found) == "auto        memory='auto' would limit all tensors on cpu to 95 GiB now"
    assert found.figures == {"auto_bytes": 95 << 30}
