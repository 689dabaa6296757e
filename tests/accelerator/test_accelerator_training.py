"""Training steps on the accelerator of this machine: with tensors on files the bits are those of the stock compiler.

A GPU counts, and so does PyTorch's simulated accelerator (`tests/runtime/real_device.py`).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from ssd_fx.runtime.engines import staged
from tests.bitwise import Compile, ours, prove_bitwise, run, stock
from tests.models import Residual
from tests.rates import QUICK
from tests.runtime.real_device import kinds

pytestmark = pytest.mark.skipif(not kinds(), reason="no accelerator here, nor the simulated one, torch_openreg")
WIDTH, STEPS = 64, 4


def trained(compile: Compile) -> list[Tensor]:
    """Losses and gradients of every step, on the host."""
    (device,) = kinds()
    model = nn.Sequential(*(Residual(WIDTH) for _ in range(3))).to(device)
    step, seen = compile(model), []
    for number in range(STEPS):
        x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
        loss = step(x).square().mean()
        loss.backward()
        seen += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
    return seen


@pytest.mark.parametrize(
    "more",
    [
        {"engine": "memory"},
        {"engine": "posix"},
        {"engine": "posix", "host_budget": "64KiB"},
        {"engine": "posix", "budget": 0.5},
        {"engine": "posix", "adapt": False, "prefetch": 0},
    ],
    ids=["memory", "posix", "tiers", "half", "nothing-ahead"],
)
def test_gradients_are_those_of_the_stock_compiler(more: dict[str, Any], tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path)], "allow_tmpfs": True, "inner": "aot_eager", "machine": QUICK}
    options |= {"min_bytes": 0, "budget": 0} | more
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ssd_fx has no fast way")
        prove_bitwise(trained, [stock("aot_eager"), ours(options)])
    counts = ssd_fx.stats()
    assert counts.offloaded_bytes > STEPS * 3 * 96 * WIDTH * 4
    assert counts.kept_bytes == 0


@pytest.mark.skipif(staged.needed() is None, reason="this accelerator has a way of its own to files")
def test_a_device_without_a_fast_way_to_files_says_so(tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path)], "allow_tmpfs": True, "inner": "aot_eager", "machine": "default", "budget": 0}
    with pytest.warns(RuntimeWarning, match=f"ssd_fx has no fast way between {kinds()[0]} and files"):
        run(trained, ours(options, min_bytes=0, inflight=1 << 21))
