"""Other people's models through Inductor on CUDA: the bits of what stays on the device, whatever way a tensor took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers", reason="the zoo needs pip install -e '.[zoo]'")

import ssd_fx
from tests.bitwise import Compile, assert_same_bits, deterministic, ours, stock
from tests.gpu import switched
from tests.zoo.models import MODELS
from tests.zoo.trial import Training, near, trial

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    """Attention that saves memory adds up in any order in its backward; cuDNN's convolutions round to TF32."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def once_more(training: Training, compile: Compile) -> dict[str, torch.Tensor]:
    """With the code of the run before."""
    ssd_fx.reset_stats()
    with deterministic():
        return training(compile)


@pytest.mark.parametrize("name", MODELS)
def test_every_way(name: str, tmp_path: Path) -> None:
    """With writes under way when the backward begins, and with all of them done. And near plain Inductor."""
    options = {"dirs": [str(tmp_path)], "allow_tmpfs": True, "min_bytes": 0, "budget": 0, "adapt": False}
    training = Training(MODELS[name], 0.1, DEVICE, settled=False)
    plain = trial(training, stock("inductor"))
    with switched.kept():
        expected = trial(training, ours(options, engine=switched.NAME))
        assert expected.written_bytes == 0
        again = once_more(training, ours(options, engine=switched.NAME))
        assert_same_bits(again, expected.values, "two runs of the same code, so nothing can be compared")
    assert expected.offloaded_bytes > 0.5 * expected.saved_bytes
    for way, taken in switched.ways(expected.offloaded_bytes).items():
        for training.settled in (False, True):
            with taken():
                found, stats = once_more(training, ours(options, engine=switched.NAME)), ssd_fx.stats()
            assert_same_bits(found, expected.values, f"{way}, settled: {training.settled}")
            assert stats.kept_bytes == 0, (way, training.settled)
            moved = min(stats.written_bytes, stats.read_bytes)
            assert moved > 0.5 * stats.offloaded_bytes or not training.settled, (way, stats)
    assert near(expected.values, plain.values)
    assert expected.graph_breaks <= plain.graph_breaks
