"""Random programs that compare sums of products, with all computed again that has a price, against float64.

Inductor may round a tensor otherwise in the backward than in the forward. A gradient that hangs on a comparison of it
with a saved result of itself would then be off by far more than rounding, or NaN. Bits cannot be compared here: what is
computed again may differ in the last one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config

import ssd_fx
from tests.passes.recomputing import everything_recomputed

Function = Callable[[torch.Tensor], torch.Tensor]
OPTIONS = {"engine": "memory", "min_bytes": 0, "budget": 0, "recompute": True}
WIDTH, ROWS, LAYERS = 24, 16, 4

COMPARING: dict[str, Function] = {
    "amax": lambda h: h - h.amax(-1, keepdim=True),
    "max of all": lambda h: h / h.abs().max(),
    "cummax": lambda h: h.cummax(-1).values,
    "sort": lambda h: h.sort(-1).values * torch.arange(h.shape[-1]).to(h),
    "median": lambda h: h - h.median(-1, keepdim=True).values,
    "maximum": lambda h: torch.maximum(h, h.flip(0)),
    "minimum with the mean": lambda h: torch.minimum(h, h.mean(-1, keepdim=True)),
    "clamp": lambda h: h.clamp(h.mean() - 0.5, h.mean() + 0.5),
    "norm": lambda h: h / h.norm(float("inf"), -1, True),
    "cdist": lambda h: torch.cdist(h, h.roll(1, 0), p=1),
    "distance of the maximum": lambda h: torch.cdist(h, h.roll(1, 0), p=float("inf")),
    "max_pool": lambda h: F.max_pool1d(h[None], 2)[0],
    "hinge": lambda h: F.relu(h - h.roll(1, 0)),
    "where": lambda h: torch.where(h > h.roll(1, -1), h, h * 0.1),
    "softmax": lambda h: h.softmax(-1) * h.amax(0),
    "logsumexp": lambda h: h.logsumexp(-1),
    "scatter": lambda h: torch.zeros_like(h).scatter_reduce(0, (h > 0).long(), h, "amax"),
    "absolute difference": lambda h: (h - h.mean(0)).abs(),
}
MIXING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addmm": lambda h, w: torch.addmm(h.roll(1, 0), h, w),
    "sum": lambda h, w: h @ w + h,
    "scaled": lambda h, w: (h @ w) * 0.5 + h * 2,
    "two": lambda h, w: h @ w + h.sin() @ w.T,
    "bmm": lambda h, w: torch.baddbmm(h.view(2, -1, WIDTH), h.view(2, -1, WIDTH), w.expand(2, -1, -1)).view_as(h),
    "index_add": lambda h, w: (h @ w).index_add(0, torch.arange(ROWS) // 2, h),
    "layer_norm": lambda h, w: F.layer_norm(h @ w + h, (WIDTH,)),
    "gelu": lambda h, w: F.gelu(h @ w + 1) + h,
    "product read twice": lambda h, w: (product := h @ w) + h.sin() + (product * h).tanh(),
}


def program(seed: int) -> Callable[..., torch.Tensor]:
    rng = random.Random(seed)
    mixing = [MIXING[rng.choice(list(MIXING))] for _ in range(LAYERS)]
    comparing = [COMPARING[rng.choice(list(COMPARING))] for _ in range(LAYERS)]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        h, loss = x, x.new_zeros(())
        for mix, compare, w in zip(mixing, comparing, weights, strict=True):
            h = mix(h, w)
            found = compare(h)
            loss = loss + found.sin().mean()
            h = h + found if found.shape == h.shape else h
        return loss + h.mean()

    return run


def gradients(function: Callable[..., torch.Tensor], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    inputs = [each.to(dtype).requires_grad_() for each in (x, *weights)]
    return list(torch.autograd.grad(function(*inputs), inputs))


def check(seeds: range) -> None:
    computed_again = 0
    for seed in seeds:
        torch._dynamo.reset()
        function = program(seed)
        expected = gradients(function, seed, torch.float64)
        compiled = torch.compile(function, backend=ssd_fx.backend, options=OPTIONS)
        with everything_recomputed() as groups, config.patch(force_disable_caches=True):
            found = gradients(compiled, seed, torch.float32)
        computed_again += sum(groups)
        for mine, exact in zip(found, expected, strict=True):
            error = float((mine - exact).norm() / exact.norm())
            assert error < 1e-3, f"seed {seed}: the gradient is off by {error:.2g} of its norm"
    assert computed_again > len(seeds)


def test_comparisons_see_what_was_saved() -> None:
    check(range(2))


@pytest.mark.slow
def test_fifty_programs_of_comparisons() -> None:
    check(range(2, 50))
