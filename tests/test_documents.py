"""The documents: pages made by the package are as it makes them, links lead somewhere, lines fit."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ssd_fx import Config
from ssd_fx.report import options

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


def test_the_page_of_options_is_up_to_date() -> None:
    """If not: python -m ssd_fx.report.options > docs/options.md."""
    assert (ROOT / "docs" / "options.md").read_text() == options.page()


def test_the_page_has_every_option_in_its_order() -> None:
    sections = re.findall(r"^## (\w+)$", options.page(), re.MULTILINE)
    assert sections == [field.name for field in fields(Config)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []
