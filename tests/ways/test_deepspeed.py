"""DeepSpeed's ZeRO on two ranks: its engine compiles the module itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ways.ways import assert_two_ranks_agree, installed

pytestmark = pytest.mark.slow
installed("deepspeed")


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero_on_two_ranks(tmp_path: Path, stage: str) -> None:
    steps, parameters = 3, 3 * 6
    assert_two_ranks_agree("tests.ways.zero_rank", tmp_path, stage, steps + parameters, DS_ACCELERATOR="cpu")
