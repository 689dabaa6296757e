"""The documents: pages made by the package are as it makes them, links lead somewhere, lines fit."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ssd_fx
from ssd_fx import Config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
RECORDS = [*(ROOT / "docs" / "results").rglob("*.md")]  # of what was measured; pages of the site refer to them
SOURCES = [path for room in ("passes", "runtime", "ssd_fx") for path in (ROOT / room).rglob("*.py")]


def loaded(path: Path) -> ModuleType:
    """The module in a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_options_is_up_to_date() -> None:
    """If not: python docs/options.py > docs/options.md."""
    assert (ROOT / "docs" / "options.md").read_text() == loaded(ROOT / "docs" / "options.py").page()


def test_the_page_has_every_option_in_its_order() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert sections == [field.name for field in fields(Config)]


def test_the_page_of_the_report_names_files_and_classes_that_are_there() -> None:
    _, _, text = (ROOT / "docs" / "report.md").read_text().partition("## How it is made")
    files, classes = (set(re.findall(pattern, text)) for pattern in (r"`(\w+\.py)`", r"`([A-Z]\w+)`"))
    assert files - {path.name for path in (ROOT / "ssd_fx" / "report").iterdir()} == set()
    assert classes - {name for path in SOURCES for name in re.findall(r"^class (\w+)", path.read_text(), re.M)} == set()


@pytest.fixture
def excerpts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the excerpts are of torch 2.13, and another one names nodes otherwise")
    monkeypatch.syspath_prepend(ROOT / "examples")
    for name in ("SSD_FX_BUDGET", "SSD_FX_RECOMPUTE"):
        monkeypatch.delenv(name, raising=False)  # `conftest.py` sets them, and the names of graphs depend on them
    return importlib.import_module("excerpts")


PAGES_WITH_EXCERPTS = ["budget.md", "how-it-works.md", "tutorial.md"]


def test_the_pages_with_excerpts_are_known(excerpts: ModuleType) -> None:
    assert [path.name for path in excerpts.PAGES if excerpts.blocks(path.read_text())] == PAGES_WITH_EXCERPTS


@pytest.mark.parametrize("name", PAGES_WITH_EXCERPTS)
def test_the_quick_excerpts_are_up_to_date(excerpts: ModuleType, name: str) -> None:
    """If not: make pages."""
    page = (ROOT / "docs" / name).read_text()
    assert excerpts.filled(page, excerpts.QUICK) == page


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES_WITH_EXCERPTS)
def test_all_excerpts_are_up_to_date(excerpts: ModuleType, name: str) -> None:
    """What scripts and commands print, and Inductor's code. If not: make pages."""
    page = (ROOT / "docs" / name).read_text()
    assert excerpts.filled(page) == page


def test_an_excerpt_that_differs_is_made_again(excerpts: ModuleType) -> None:
    block = "<!-- code: examples/tutorial.py stats -->\n```python\n{}\n```\n"
    assert excerpts.filled(block.format("old")) == block.format("print(ssd_fx.stats())")


def test_an_excerpt_that_no_program_makes_is_an_error(excerpts: ModuleType) -> None:
    with pytest.raises(KeyError, match="nowhere"):
        excerpts.filled("<!-- code: examples/tutorial.py nowhere -->\n```\nold\n```\n")
    with pytest.raises(ValueError, match="ls is no command of ours; right would be one that begins with ssd-fx"):
        excerpts.filled("<!-- command: ls -->\n```\nold\n```\n")


def test_what_varies_is_no_difference(excerpts: ModuleType) -> None:
    old = "5 steps, 11.5 ms of stall\nwritten     27.00 MiB   to the drive\ncancelled   1.00 MiB\non disk: 1"
    new = "5 steps, 0.3 ms of stall\nwritten     26.00 MiB   to the drive\non disk: 1"
    assert excerpts.masked(old) == excerpts.masked(new)
    assert excerpts.masked(old) != excerpts.masked(new.replace("5 steps", "6 steps"))


@pytest.mark.parametrize("document", DOCUMENTS + RECORDS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_the_readme_is_short_and_names_options_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 116
    table = readme.split("## Options")[1].split("## ")[0]
    named = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == 10
    assert set(named) <= {field.name for field in fields(Config)}


@pytest.mark.parametrize(
    ("page", "row", "count", "record"),
    [
        ("README.md", r"^\| .*\| (?:time|live, MiB|process, MiB) \| .*$", 3, "docs/results/measurements.md"),
        ("docs/pareto.md", r"^\| .* GiB, .* GiB, .*$", 6, "docs/results/pareto/2026-11-29.md"),
        ("docs/pareto.md", r"^\| \w+ \| \d\.\d+ \(.*$", 6, "docs/results/pareto/2026-11-29.md"),
    ],
)
def test_the_figures_of_a_table_are_those_of_a_record(page: str, row: str, count: int, record: str) -> None:
    """A figure is measured or predicted once; the tables of other pages quote it."""
    rows = re.findall(row, (ROOT / page).read_text(), re.MULTILINE)
    quoted = [figure for line in rows for figure in re.findall(r"(?<![\w.])(?:\d+\.\d+|\d{3,})(?![\w.])", line)]
    assert len(rows) == count
    assert len(quoted) >= 13
    assert set(quoted) - set(re.findall(r"\d+(?:\.\d+)?", (ROOT / record).read_text())) == set()


def test_every_word_of_the_glossary_is_used() -> None:
    """What nobody says any more goes."""
    page = (ROOT / "docs" / "glossary.md").read_text()
    entries = re.findall(r"^- (\*\*.*?):", page, re.MULTILINE)
    words = [
        word.lower() for entry in entries for bold in re.findall(r"\*\*(.+?)\*\*", entry) for word in bold.split(", ")
    ]
    said = "\n".join(path.read_text() for path in SOURCES).lower()
    assert len(words) > 50
    assert [word for word in words if word not in said and word.replace(" ", "_") not in said] == []


def test_the_test_of_a_plan_that_users_are_shown() -> None:
    (shown,) = re.findall(r"```python\n(def test_.*?)```", (ROOT / "docs" / "using.md").read_text(), re.DOTALL)
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    names: dict[str, Any] = {"ssd_fx": ssd_fx, "x": x, "w": w}
    exec(shown, names)
    names["test_the_relu_is_offloaded"]()


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if d.name != "compatibility.md"], ids=lambda path: path.name)
def test_lines_end_at_120_columns(document: Path) -> None:
    assert [line for line in document.read_text().splitlines() if len(line) > 120] == []
