"""The list of planted faults fits the code, and the runner tells a fault that is found from one that is not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted import run
from tests.planted.fault import ROOT, Fault
from tests.planted.faults import FAULTS
from tests.planted.results import NOT_FOUND, read, record, table

FAULT = Fault("off_by_one", "runtime/a.py", "n < 3", "n <= 3", "one too many", "tests/runtime/test_a.py")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of pytest here need no plugin, and loading those takes four fifths of their time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_code(fault: Fault) -> None:
    """If the code has changed: give the fault its new text, or take another fault of the same hazard."""
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    if fault.file.endswith(".py"):
        ast.parse(text.replace(fault.old, fault.new))
    assert all((ROOT / path.split("::")[0]).exists() for path in fault.paths)


def test_there_are_at_least_sixty_of_different_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_it_is_planted_once(tmp_path: Path) -> None:
    path = tmp_path / FAULT.file
    path.parent.mkdir()
    path.write_text("while n < 3: n += 1\n")
    FAULT.plant(tmp_path)
    assert path.read_text() == "while n <= 3: n += 1\n"
    with pytest.raises(ValueError, match=r"off_by_one: 'n < 3' is 0 times in runtime/a\.py, not once"):
        FAULT.plant(tmp_path)


@pytest.mark.parametrize(
    ("test", "found_by"),
    [
        ("assert False, 'wrong - because'", "test_a.py::test[a b]"),
        ("__import__('os').abort()", "crashes: test_a.py"),
        ("__import__('time').sleep(60)", "hangs: test_a.py"),
    ],
)
def test_how_a_run_ends(tmp_path: Path, test: str, found_by: str) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    marks = "import pytest\n@pytest.mark.parametrize('x', ['a b'])\n"
    (checkout / "test_a.py").write_text(f"{marks}def test(x):\n    {test}\n")
    assert run.failure(checkout, ["test_a.py"], 1.0 if "hangs" in found_by else 60.0) == found_by


def test_tests_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    with pytest.raises(RuntimeError, match=r"could not run \['test_a\.py'\]"):
        run.failure(checkout, ["test_a.py"], 60.0)


def checkout_of(root: Path, test: str) -> None:
    """A project of one module, with one test of it."""
    code = {"runtime/__init__.py": "", "runtime/a.py": "def low(n): return n < 3\n"}
    for name, text in (code | {"tests/runtime/test_a.py": test}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


WATCHES = "from runtime.a import low\ndef test(): assert not low(3)\n"


@pytest.mark.parametrize(
    ("test", "found_by"), [(WATCHES, "tests/runtime/test_a.py::test"), (WATCHES.replace("(3)", "(4)"), NOT_FOUND)]
)
def test_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, found_by: str) -> None:
    checkout_of(tmp_path / "root", test)
    monkeypatch.setattr(run, "ROOT", tmp_path / "root")
    assert run.trial(FAULT, tmp_path / "scratch").found_by == found_by


def test_a_test_that_fails_anyway_has_found_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout_of(tmp_path / "root", "def test(): assert False\n")
    monkeypatch.setattr(run, "ROOT", tmp_path / "root")
    with pytest.raises(ValueError, match=r"off_by_one: .*::test failed with it, and .*::test without it"):
        run.trial(FAULT, tmp_path / "scratch")


def test_results_keep_the_first(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    record(path, "off_by_one", NOT_FOUND, 80.4)
    record(path, "off_by_one", "tests/runtime/test_a.py::test[1]", 3.2)
    page = table([FAULT], read(path))
    assert "Of 1 faults the default tests found 0 when they were first planted. Now they find 1." in page
    row = "| off_by_one | runtime/a.py | one too many | not found | `runtime/test_a.py::test` | 3 |"
    assert page.splitlines()[-1] == row
