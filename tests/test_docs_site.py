"""The site of the documents: every page has its place in the navigation, and Sphinx builds it without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ssd_fx
from tests.test_documents import DOCUMENTS, RECORDS, ROOT, loaded


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    return loaded(ROOT / "docs" / "conf.py")


def test_every_page_stands_in_one_part_of_the_navigation(conf: ModuleType) -> None:
    listed = [page for pages in conf.NAVIGATION.values() for page in pages]
    found = [str(path.relative_to(ROOT).with_suffix("")) for path in DOCUMENTS + RECORDS if path != ROOT / "README.md"]
    assert sorted(listed) == sorted(found)


def test_the_page_of_the_api_has_every_public_name() -> None:
    named = re.findall(r"auto\w+:: ssd_fx\.(\w+)", (ROOT / "docs" / "api.md").read_text())
    assert sorted(named) == sorted(ssd_fx.__all__)


def test_the_members_that_the_page_of_the_api_names_exist() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    members = re.findall(r"autoclass:: ssd_fx\.(\w+)\(\)\n   :members: (.*)", page)
    named = [(kind, name) for kind, names in members for name in names.split(", ")]
    assert [(kind, name) for kind, name in named if not hasattr(getattr(ssd_fx, kind), name)] == []
    assert ("Estimate", "fastest") in named


def built(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    flags = ["-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(site / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *flags, str(source), str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Path:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    folder: Path = tmp_path_factory.mktemp("site")
    made = built(ROOT, folder)
    assert made.stderr == ""
    assert made.returncode == 0
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site: Path) -> None:
    pages = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")}
    assert {str(document.relative_to(ROOT)) for document in DOCUMENTS} <= pages


@pytest.mark.slow
def test_a_reader_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = r"""<(?:script|img|iframe|link rel="(?:stylesheet|preload|icon)")[^>]*(?:src|href)="(?:https?:)?//[^"]*"""
    text = [path.read_text() for path in site.rglob("*.html")]
    assert [found for page in text for found in re.findall(loads, page)] == []
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert [
        found for style in styles for found in re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//\S+", style)
    ] == []


@pytest.mark.slow
def test_a_link_that_leads_nowhere_fails(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    (tmp_path / "docs").mkdir()
    for page in DOCUMENTS + RECORDS:
        (tmp_path / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page.relative_to(ROOT)).write_text("# Title\n\n[nowhere](nowhere.md)\n")
    made = built(tmp_path, tmp_path / "site")
    assert made.returncode == 1
    assert "nowhere.md" in made.stderr
