"""The SMART log of an NVMe drive, as the specification lays it out."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct
from pathlib import Path

import pytest

from ssd_fx.command import smart


def log(*, used: int, spare: int, written_units: int, errors: int) -> bytes:
    page = bytearray(512)
    page[3], page[5] = spare, used
    page[48:64] = written_units.to_bytes(16, "little")
    page[160:176] = errors.to_bytes(16, "little")
    return bytes(page)


PAGE = log(used=3, spare=100, written_units=35_156_250, errors=1)


def test_what_the_log_says() -> None:
    found = smart.parse(PAGE)
    assert found == smart.Wear(written_bytes=18 * 10**12, used_percent=3, spare_percent=100, media_errors=1)
    assert found.endurance_bytes == 600e12


def test_a_new_drive_has_no_known_endurance() -> None:
    assert smart.parse(log(used=0, spare=100, written_units=5, errors=0)).endurance_bytes == 0


def test_the_drive_is_asked_for_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme0").touch()

    def drive(_: int, request: int, command: bytearray) -> int:
        assert (request, len(command)) == (0xC0484E41, 72)  # sizes are a part of the request's number
        assert (request >> 16) & 0x3FFF == len(command)
        opcode, namespace = command[0], struct.unpack_from("<I", command, 4)[0]
        address, length, what = (
            struct.unpack_from(kind, command, at)[0] for kind, at in (("<Q", 24), ("<I", 36), ("<I", 40))
        )
        assert (opcode, namespace, length) == (2, 0xFFFFFFFF, 512)
        assert what == 127 << 16 | 2
        ctypes.memmove(address, PAGE, 512)
        return 0

    monkeypatch.setattr(fcntl, "ioctl", drive)
    assert smart.read("nvme0", str(tmp_path)).used_percent == 3


def test_a_drive_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvme0").touch()
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0x4002)
    with pytest.raises(OSError, match="refuses its SMART log with NVMe status 0x4002") as caught:
        smart.read("nvme0", str(tmp_path))
    assert caught.value.errno == errno.EIO


def test_no_such_drive(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        smart.read("nvme9", str(tmp_path))
