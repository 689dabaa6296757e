"""A torch that nobody has tried is refused before it can compute anything wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ssd_fx import versions
from tests import fresh

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
PRETEND = "import torch; torch.__version__ = '2.10.1+cpu'; import ssd_fx"


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3", "2.14.0a0+git1234"])
def test_known_versions_pass(version: str) -> None:
    versions.check(version)


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0+cu128", "2.16.0.dev20261101", "3.0.0", "a build of mine"])
def test_others_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.ANYWAY, raising=False)
    with pytest.raises(ImportError, match=rf"torch 2\.11 to 2\.15, and this is torch {re.escape(version)}: install"):
        versions.check(version)


def test_who_wants_to_try_one_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(versions.ANYWAY, "1")
    with pytest.warns(RuntimeWarning, match=r"this is torch 2\.16\.0, which SSD_FX_ANY_TORCH=1 lets through"):
        versions.check("2.16.0")


def test_the_import_of_the_package_refuses() -> None:
    found = fresh.run(PRETEND)
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1].startswith("ImportError: ssd_fx knows torch 2.11 to 2.15, and this is")


def test_what_pip_is_told_is_what_is_checked() -> None:
    (first, behind), last = versions.FIRST, versions.LAST
    assert f'"torch>={first}.{behind},<{last[0]}.{last[1] + 1}"' in PYPROJECT.read_text()
