from __future__ import annotations

from pathlib import Path

import pytest

import ssd_fx
from ssd_fx import cli


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
