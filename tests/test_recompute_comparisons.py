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
Function2 = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
OPTIONS = {"engine": "memory", "min_bytes": 0, "budget": 0, "recompute": True}
WIDTH, ROWS, LAYERS = 64, 32, 3
INNER = 4096  # a product over so many adds up in several blocks, and `addmm` begins with what is added

COMPARING: dict[str, Function] = {
    "amax": lambda h: h - h.amax(-1, keepdim=True),
    "max of all": lambda h: h / h.abs().max(),
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
MULTIPLYING: dict[str, Function2] = {
    "mm": lambda h, w: h @ w,
    "linear": lambda h, w: F.linear(h, w.T),
    "bmm": lambda h, w: (h.view(2, -1, INNER) @ w).flatten(0, 1),
    "of a function": lambda h, w: h.tanh() @ w,
}
ADDING: dict[str, Function2] = {
    "bias": lambda product, w: product + w[0],
    "column": lambda product, w: product + w[:ROWS, :1],
    "rows": lambda product, w: product + w[:ROWS],
    "twice": lambda product, w: product + w[0] + w[1],
    "index_add": lambda product, w: product.index_add(0, torch.arange(ROWS) // 2, w[:ROWS]),
    "another product": lambda product, w: product + w[:ROWS] @ w[:WIDTH],
    "layer_norm": lambda product, w: F.layer_norm(product, (WIDTH,)) + w[0],
}


def program(seed: int) -> Callable[..., torch.Tensor]:
    """Each layer multiplies, adds and compares. It reads the product once more, in a way that saves nothing of it.

    So Inductor may make one `addmm` of product and sum where the sum is computed again, but not in the forward.
    """
    rng = random.Random(seed)
    layers = [[of[rng.choice(list(of))] for of in (MULTIPLYING, ADDING)] for _ in range(LAYERS)]
    comparing = [COMPARING[rng.choice(list(COMPARING))] for _ in range(LAYERS)]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        h, loss = x, x.new_zeros(())
        for (multiply, add), compare, w in zip(layers, comparing, weights, strict=True):
            product = multiply(h.repeat(1, INNER // WIDTH), w)
            h = add(product, w)
            found = compare(h)
            loss = loss + found.sin().mean() + 1e-3 * (product * torch.linspace(-1, 1, WIDTH).to(product)).sum()
        return loss + h.mean()

    return run


def gradients(function: Callable[..., torch.Tensor], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH)
    weights = [torch.randn(INNER, WIDTH) / INNER**0.5 for _ in range(LAYERS)]
    inputs = [each.to(dtype).requires_grad_() for each in (x, *weights)]
    return list(torch.autograd.grad(function(*inputs), inputs))


def check(seeds: range) -> None:
    computed_again = 0
    for seed in seeds:
        torch._dynamo.reset()
        function = program(seed)
        expected = gradients(function, seed, torch.float64)
        compiled = torch.compile(function, backend=ssd_fx.backend, options=OPTIONS)
        # a row's maximum, which is small, is saved
        with everything_recomputed(least=ROWS * WIDTH) as groups, config.patch(force_disable_caches=True):
            found = gradients(compiled, seed, torch.float32)
        computed_again += sum(groups)
        if not are_close(found, expected):  # with `cummax` plain Inductor 2.13 was wrong itself
            torch._dynamo.reset()
            plain = gradients(torch.compile(function), seed, torch.float32)
            assert are_close(found, plain), f"program {seed}: gradients off, which are right with plain Inductor"
    assert computed_again > len(seeds)


def are_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(float((a - b).norm() / b.norm()) < 1e-3 for a, b in zip(found, expected, strict=True))


def test_comparisons_see_what_was_saved() -> None:
    """Without `compared` the gradients of this program are NaN."""
    check(range(3, 4))


def test_a_comparison_that_the_forward_made_is_not_made_again() -> None:
    """The forward compares a product with its largest, and saves the mask. The next cut would compare in the backward.

    That has the product anyway, computed again and rounded otherwise, and the gradients were NaN.
    """
    function = program(6)
    compiled = torch.compile(function, backend=ssd_fx.backend, options=OPTIONS)
    with everything_recomputed(least=ROWS * WIDTH) as groups:
        found = gradients(compiled, 6, torch.float32)
    assert groups == [0]  # what was proposed is refused
    assert are_close(found, gradients(function, 6, torch.float64))


@pytest.mark.slow
def test_forty_programs_of_comparisons() -> None:
    check(range(2, 44))
