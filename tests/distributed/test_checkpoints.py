"""`ssd_fx.checkpoint` around the blocks of FSDP2, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun

pytestmark = pytest.mark.slow


def test_fsdp2_with_checkpoints_of_ours(tmp_path: Path) -> None:
    status, output = torchrun("-m", "tests.distributed.checkpoints", str(tmp_path), ranks=2, timeout_s=300)
    found = re.findall(r"rank (\d): same (\w+), (\d+) stores, (\d+) loads", output)
    assert status == 0, output[-4000:]
    assert sorted((rank, same) for rank, same, _, _ in found) == [("0", "True"), ("1", "True")], output[-4000:]
    assert all(int(stores) and stores == loads for _, _, stores, loads in found)
