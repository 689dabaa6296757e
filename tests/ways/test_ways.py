"""What runs the other tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ways.ways import installed


def test_a_package_that_lacks_another_is_no_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan imports Triton, which PyTorch's CPU build leaves out, and its tests were skipped without a word."""
    (tmp_path / "lacking.py").write_text("import what_nobody_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_nobody_installed"):
        installed("lacking")
    with pytest.raises(pytest.skip.Exception, match="make ways installs it"):
        installed("what_nobody_installed.part")
