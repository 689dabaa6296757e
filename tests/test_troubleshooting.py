"""docs/troubleshooting.md has every error, warning and log message of the source, and none that is gone."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import pytest

from tests.messages import GAP, ROOT, Message, every_text, messages

PASSED_ON = {
    # These places say nothing of their own: they pass on what another place of the package, or the system, said.
    ("passes/joint/recompute.py", "CutError"),
    ("passes/lowering/audit.py", "VerifyError"),
    ("passes/planner/solve.py", "BudgetError"),
    ("passes/verify/errors.py", "VerifyError"),
    ("runtime/engines/preflight.py", "OSError"),
    ("runtime/native/loader.py", "OSError"),
    ("ssd_fx/backend.py", "ValueError"),
    ("ssd_fx/backend.py", "log"),
    ("ssd_fx/cli.py", "print"),
    ("ssd_fx/command/calibrating.py", "print"),
    ("ssd_fx/command/doctor.py", "print"),
    ("ssd_fx/explain_script.py", "print"),
    ("ssd_fx/progress.py", "log"),
    ("ssd_fx/progress.py", "print"),
    ("ssd_fx/refusal.py", "Refused"),
    ("ssd_fx/report/folder.py", "log"),
    ("ssd_fx/report/page.py", "OSError"),
    ("ssd_fx/script.py", "ValueError"),
    ("ssd_fx/script.py", "_Ended"),
    ("ssd_fx/survey.py", "ValueError"),
    ("ssd_fx/survey.py", "_Surveyed"),
    # Too short to be looked for: "no rates: 'measured'".
    ("ssd_fx/calibration/cache.py", "ValueError"),
}


@dataclass(frozen=True)
class Page:
    """What the page lists: messages with their causes, and families, as (kind of error, file or folder)."""

    entries: dict[str, str]
    families: frozenset[tuple[str, str]]

    @staticmethod
    def read(text: str) -> Page:
        items = re.split(r"\n(?=- |\n)", text)
        found = [re.fullmatch(r"- `([^`]+)`: (.+)", " ".join(item.split())) for item in items]
        names = r"((?:`[\w/.]+`(?:, )?)+)"
        rows = re.findall(f"^- {names} of {names}:", text, re.MULTILINE)
        cells = [(re.findall("`(.+?)`", kinds), re.findall("`(.+?)`", places)) for kinds, places in rows]
        families = frozenset((kind, place) for kinds, places in cells for kind in kinds for place in places)
        return Page({entry[1]: entry[2] for entry in found if entry}, families)

    def lists(self, text: str) -> bool:
        return any(_says(entry, text) for entry in self.entries)

    def family(self, message: Message) -> tuple[str, str] | None:
        of = (family for family in self.families if message.kind == family[0] and message.module.startswith(family[1]))
        return next(of, None)


def _says(entry: str, text: str) -> bool:
    """Whether a message may be the one that the page calls so. A gap of the page stands for anything."""
    return _pattern(entry).search(text.replace("`", "")) is not None


@functools.cache
def _pattern(entry: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, entry.strip(GAP).split(GAP))))


def unlisted(page: Page) -> list[str]:
    """What the source says and the page does not have."""
    listed = (message for message in messages() if not page.family(message))
    return [f"{m.module}: {m.kind}: {text}" for m in listed for text in m.texts if not page.lists(text)]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page.read((ROOT / "docs" / "troubleshooting.md").read_text())


def test_the_page_has_every_message(page: Page) -> None:
    """A new message needs an entry with its cause and its cure."""
    assert unlisted(page) == []


def test_the_page_has_no_message_that_is_gone(page: Page) -> None:
    assert [entry for entry in page.entries if not any(_says(entry, text) for text in every_text())] == []
    used = {page.family(message) for message in messages()}
    assert page.families - used == set()


def test_an_entry_names_its_message_and_its_cure(page: Page) -> None:
    assert [entry for entry in page.entries if len(re.findall("[A-Za-z]{2,}", entry)) < 2] == []
    parts = r"\*Cure:\*|\b(above|next)\b"  # some are parts of another message
    assert [entry for entry, text in page.entries.items() if not re.search(parts, text)] == []


def test_what_says_nothing_of_its_own_is_known() -> None:
    """A message that cannot be read from the source would be in no test: say it in the call, or in a variable."""
    assert {(m.module, m.kind) for m in messages() if not m.texts} == PASSED_ON


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        ("runtime/engines/extents.py", "warning", "keeps activations in memory"),
        ("runtime/adapt/habits.py", "log", "no longer written"),
        ("runtime/errors.py", "RuntimeError", "was given away"),
        ("runtime/engines/preflight.py", "OSError", "mounted read-only"),  # in a table that the function reads
        ("ssd_fx/script.py", "ValueError", "failed before it trained"),  # made by another function
        ("ssd_fx/calibration/calibrate.py", "_Unmeasured", "how fast this machine computes"),
        ("runtime/native/allocator.cpp", "print", "is not in use"),
    ],
)
def test_messages_of_all_kinds_are_found(module: str, kind: str, said: str) -> None:
    assert [m for m in messages() if (m.module, m.kind) == (module, kind) and any(said in text for text in m.texts)]


def test_a_message_without_an_entry_is_noticed(page: Page) -> None:
    entry = "the file is closed"
    assert entry in page.entries
    without = Page({text: cause for text, cause in page.entries.items() if text != entry}, page.families)
    assert unlisted(without) == ["runtime/engines/extents.py: OSError: the file is closed"]
    no_families = Page(page.entries, frozenset())
    assert any("right would be" in missing for missing in unlisted(no_families))
