from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

import ssd_fx
from ssd_fx import cli
from ssd_fx.runtime.native import loader


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"ssd_fx   {ssd_fx.__version__}, torch 2." in out
    assert '"min_bytes": 1048576' in out


def test_check_a_good_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (line.split("  ")[0] for line in lines)
    assert (first, second) == ("first pass (the file grows)", "second pass (its space is reused)")
    assert all("MB/s" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_check_an_unfit_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(tmp_path / "missing")]) == 1
    assert f"'{tmp_path / 'missing'}'" in capsys.readouterr().err


def test_check_without_a_pool_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise RuntimeError("no pool")

    monkeypatch.setattr(loader, "library", missing)
    assert cli.main(["check", str(tmp_path)]) == cli.main(["calibrate", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "unfit: no pool\n" * 2


def test_check_a_directory_that_does_not_take_it_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not go there stays in memory, whose rates would be printed."""
    monkeypatch.setenv("SSD_FX_DISK_LIMIT", "32MiB")
    assert cli.main(["check", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "MB/s" not in out
    assert f"disk_limit is {32 << 20} B" in err
    assert "unfit: of 256 MiB only 32 MiB went to the drive and came back; " in err
    assert re.search(r"; [\d.]+ [GM]iB were free there, of which 1 GiB or 5% of the file system stay free\n$", err)


def test_check_writes_whatever_the_environment_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BUDGET": "1TiB", "HOST_BUDGET": "1TiB", "COMPRESSION": "bitpack"}.items():
        monkeypatch.setenv(f"SSD_FX_{name}", value)
    assert cli.main(["check", str(tmp_path)]) == 0
    assert ssd_fx.stats().written_bytes == ssd_fx.stats().read_bytes == 256 << 20


def test_check_a_directory_that_cannot_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "load of slot 0 failed 3 times", str(tmp_path))

    monkeypatch.setattr(cli, "_round_trip", fails)
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "unfit: [Errno 5] load of slot 0 failed 3 times" in capsys.readouterr().err


def test_a_read_only_file_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no matter of permissions, though access(2) says no as well."""

    def refuses(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "this file system is mounted read-only; name a directory on a drive" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["check", "."], ["calibrate", "."], ["info"]])
def test_a_wrong_environment(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_FX_BUDGET", "abc")
    assert cli.main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ssd-fx: SSD_FX_BUDGET in the environment: option budget='abc' is not a budget; right would")
    assert err.count("\n") == 1


def test_nobody_reads_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssd-fx info | head -1`"""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["info"]) == 141
        print("what Python flushes at exit", flush=True)
