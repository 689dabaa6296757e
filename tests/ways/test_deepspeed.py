"""DeepSpeed's ZeRO on two ranks: its engine compiles the module itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ways.ways import assert_two_ranks_agree

pytestmark = pytest.mark.slow
pytest.importorskip("deepspeed", reason="make ways installs it")


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero_on_two_ranks(tmp_path: Path, stage: str) -> None:
    steps, parameters = 3, 3 * 6
    assert_two_ranks_agree("tests.ways.zero_rank", tmp_path, stage, steps + parameters, DS_ACCELERATOR="cpu")
