from __future__ import annotations

from pathlib import Path

import pytest

import ssd_fx
from ssd_fx.report.report import Report
from tests.report.trained import report, train


@pytest.fixture(scope="session")
def found() -> Report:
    """The report of a stack that has trained."""
    return report()


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that such a stack's training exports."""
    model, path = train(), tmp_path_factory.mktemp("trace") / "trace.json"
    ssd_fx.export_trace(path)
    del model
    return path
