"""DeepSpeed's ZeRO on two ranks: its engine compiles the module itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

pytestmark = pytest.mark.slow
pytest.importorskip("deepspeed", reason="make ways installs it")


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_zero(tmp_path: Path, stage: str) -> None:
    arguments = ("-m", "tests.ways.zero_rank", str(tmp_path), stage)
    status, output = torchrun(*arguments, ranks=2, timeout_s=300, DS_ACCELERATOR="cpu")
    assert status == 0, output[-4000:]
    found = re.findall(r"rank (\d): same (\w+), (\d+) values, (\d+) stores, (\d+) loads", output)
    assert sorted((rank, same) for rank, same, *_ in found) == [("0", "True"), ("1", "True")], output[-4000:]
    assert all(int(values) > 10 and int(stores) and stores == loads for _, _, values, stores, loads in found)
