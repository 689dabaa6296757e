"""The runs under several versions of torch: what is read of them, and their table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.matrix import Outcome, table, without_torch

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure>no</failure></testcase>
<testcase classname="tests.b" name="broken"><error>no</error></testcase>
<testcase classname="tests.b" name="left"><skipped/></testcase>
</testsuite></testsuites>"""


def test_an_outcome_is_read_from_the_report(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = Outcome.read("2.13.0", tmp_path / "report.xml", 4.0)
    assert dataclasses.replace(found, python="3") == Outcome(
        "2.13.0", "3", 1, 1, ("tests.a::bad", "tests.b::broken"), 4.0
    )


def test_a_run_that_did_not_get_to_its_tests_is_no_outcome(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"report\.xml"):
        Outcome.read("2.13.0", tmp_path / "report.xml", 4.0)


def test_the_table_is_by_version_and_has_the_latest() -> None:
    first = Outcome("2.13.0", "3", 7, 1, ("tests.a::bad",), 1.0)
    old, long = Outcome("2.9.1", "3", 6, 2, (), 1.0), tuple(f"tests::n{i}" for i in range(10))
    lines = table([first, old, dataclasses.replace(first, failures=long)]).splitlines()
    assert lines[2] == "| 2.9.1 | 6 | 0 | 2 |  |"
    assert lines[3].startswith("| 2.13.0 | 7 | 10 | 1 | `tests::n0`, ")
    assert lines[3].endswith("`tests::n7`, and 2 more |")
    assert len(lines) == 4


def test_an_environment_takes_the_pins_that_are_not_torch_s() -> None:
    kept = without_torch(CONSTRAINTS.read_text())
    assert "torch" not in [line.split("==")[0] for line in kept.splitlines()]
    assert "pytest==" in kept
