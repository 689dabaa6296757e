"""The page of what was tried: every section is there, and what was not run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compatibility import NOT_RUN, VARIABLE, Result, page, read, record, tidy
from tests.matrix import Outcome


def test_a_page() -> None:
    results = [
        Result("models", "GPT-2, dropout 0.1", "aot_eager", 1_234_567, 1_000_000, graph_breaks=0),
        Result("models", "Mamba, dropout 0", "inductor", reason="plain Inductor: KeyError"),
        Result("training loops", "precision: autocast [bf16]", "inductor", 4096, 4000, 0.5),
        Result("training loops", "precision: autocast [bf16]", "inductor", 4096, 4096),  # run again
    ]
    text = page(results, [], [Outcome("2.13.0", "3", 7, 1, (), 1.0)])
    assert "| GPT-2, dropout 0.1 | aot_eager | bitwise | 1.23 MB | 1.00 MB | 0 | 0 |\n" in text
    assert "| Mamba, dropout 0 | inductor | not supported: plain Inductor: KeyError | | | | |\n" in text
    assert [line for line in text.splitlines() if "autocast" in line] == [
        "| precision: autocast [bf16] | inductor | bitwise | 4.1 kB | 4.1 kB | 0 |  |"
    ]
    assert text.count(NOT_RUN) == 4  # trainers, ways of working, several processes, PyTorch's own suites
    assert "| 2.13.0 | 7 | 0 | 1 |  |" in text


def test_a_difference_is_seen() -> None:
    text = page([Result("trainers", "with_lightning", "aot_eager", 10, 10, 1e-9)], [], [])
    assert "| with_lightning | aot_eager | DIFFERS | 0.0 kB | 0.0 kB | 1e-09 |  |" in text


def test_results_are_appended_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result("trainers", "with_lightning", "aot_eager", 10, 10)
    monkeypatch.delenv(VARIABLE, raising=False)
    record(result)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "results"))
    record(result)
    record(result)
    assert [Result(**row) for row in read(tmp_path / "results")] == [result, result]


def test_later_records_overtake_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "records"
    rows = [
        '{"section": "models", "name": "a", "inner": "inductor", "difference": 1, "torch": "2.13"}',
        '{"section": "models", "name": "b", "inner": "inductor"}',
        '{"section": "models", "name": "a", "inner": "inductor", "difference": 0, "torch": "2.15"}',
        '{"suite": "a", "calls": 1}',
        '{"op": "a"}',
        '{"torch": "2.13.0", "python": "3.11", "passed": 1}',
        '{"torch": "2.15.0", "python": "3.11", "passed": 2}',
        '{"torch": "2.13.0", "python": "3.11", "passed": 3}',
    ]
    path.write_text("\n".join(rows) + "\n")
    tidy(path)
    assert path.read_text().splitlines() == [rows[i] for i in (2, 1, 3, 4, 7, 6)]
    assert read(tmp_path / "none") == []
