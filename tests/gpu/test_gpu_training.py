"""A small GPT through Inductor on CUDA."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import ssd_fx
from examples.train_gpt import GPT, Shape
from tests.bitwise import Compile, kept, ours, prove_bitwise, run, stock
from tests.models import batch, gpt
from tests.planned_order import assert_in_planned_order
from tests.rates import QUICK

DEVICE = "cuda"
SMALL = Shape(layers=2, width=128, heads=2, seq=128, dropout=0.1)
LARGE = Shape(layers=8, width=512, heads=8, seq=512, dropout=0.1)


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    """The attention kernels that save memory add up in any order in their backward; the plain one does not."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def test_same_bits_as_in_memory(config: str) -> None:
    """Losses and gradients with everything offloaded are those of the same graphs with engine "memory"."""
    chosen = json.loads(config)
    options = {"dirs": chosen["dirs"], "allow_tmpfs": True, "min_bytes": 0, "budget": 0, "machine": QUICK}
    prove_bitwise(gpt(4, SMALL, DEVICE), [kept(options), ours(options, engine=chosen["engine"])])
    stats = ssd_fx.stats()
    assert stats.loads == stats.stores
    stored = stats.written_bytes + stats.cancelled_bytes + stats.held_bytes
    assert stored == stats.read_bytes + stats.forwarded_bytes
    assert_in_planned_order()


def test_close_to_plain_inductor(config: str) -> None:
    """Another partition, so other kernels: equal up to rounding."""
    chosen = json.loads(config)
    options = {"dirs": chosen["dirs"], "allow_tmpfs": True, "min_bytes": 0, "engine": chosen["engine"]}
    plain, found = (run(gpt(2, SMALL, DEVICE), compile) for compile in (stock("inductor"), ours(options)))
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-4)


def test_peak_memory(config: str) -> None:
    """Forward and backward need less memory, by at least half of what was saved."""
    chosen = json.loads(config)
    options = {"dirs": chosen["dirs"], "allow_tmpfs": True, "engine": chosen["engine"], "prefetch": 16 << 20}
    plain, found = peak(stock("inductor")), peak(ours(options, inflight=32 << 20))
    saved = ssd_fx.stats().saved_bytes
    assert found <= plain - saved // 2, f"{found} B at most instead of {plain} B, with {saved} B saved"


def peak(compile: Compile) -> int:
    """The most bytes above the level before forward and backward, in the third step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(LARGE).to(DEVICE)
    step = compile(model)
    inputs, targets = (x.to(DEVICE) for x in batch(LARGE, 16))
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        ssd_fx.reset_stats()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(inputs, targets).backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
