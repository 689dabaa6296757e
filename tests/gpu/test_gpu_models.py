"""Other people's models through Inductor on CUDA: the bits of what stays on the device, whatever way a tensor took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers", reason="the zoo needs pip install -e '.[zoo]'")

import ssd_fx
from tests.gpu import switched
from tests.zoo.models import MODELS
from tests.zoo.trial import Compiled, deterministic

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    """Attention that saves memory adds up in any order in its backward; cuDNN's convolutions round to TF32."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_every_way(name: str, tmp_path: Path) -> None:
    """With writes under way when the backward begins, and with all of them done. And near plain Inductor."""
    options = {"dirs": [str(tmp_path)], "allow_tmpfs": True, "min_bytes": 0, "budget": 0, "adapt": False}
    with deterministic():
        ours = Compiled(MODELS[name], 0.1, options | {"engine": switched.NAME}, DEVICE)
        with switched.kept():
            kept = ours.train()
            assert kept.written_bytes == 0
            assert ours.train().apart(kept) == {}, "two runs of the same code differ, so nothing can be compared"
        assert kept.offloaded_bytes > 0.5 * kept.saved_bytes
        for way, taken in switched.ways(kept.offloaded_bytes).items():
            for settled in (False, True):
                with taken():
                    found = ours.train(settled=settled)
                assert found.apart(kept) == {}, (way, settled)
                assert ssd_fx.stats().kept_bytes == 0, (way, settled)
                moved = min(found.written_bytes, found.read_bytes)
                assert moved > 0.5 * found.offloaded_bytes or not settled, (way, found)
        plain = Compiled(MODELS[name], 0.1, None, DEVICE).train()
    assert kept.close_to(plain)
    assert kept.graph_breaks <= plain.graph_breaks
