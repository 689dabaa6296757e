"""What the end-to-end tests train: the example's GPT, small, on random bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import ssd_fx
from examples.train_gpt import GPT, Shape

SMALL = Shape(layers=2, width=64, heads=2, seq=64, dropout=0.1)


def batch(shape: Shape = SMALL, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Random (inputs, targets), int64 [size, seq]."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 256, (size, shape.seq + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def train(options: Mapping[str, Any] | None, steps: int = 5, shape: Shape = SMALL) -> list[torch.Tensor]:
    """Loss and all gradients of every step of a fresh model; `options` None is plain Inductor."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options is None:
        compiled = torch.compile(model)
    else:
        compiled = torch.compile(model, backend=ssd_fx.backend, options=dict(options))
    seen = []
    for _ in range(steps):
        loss = compiled(*batch(shape))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
    assert len(a) == len(b) > 0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"tensor {i} differs by {(x - y).abs().max().item():.3g}"


def close(x: torch.Tensor, y: torch.Tensor, apart: float = 1e-3, least: float = 1e-7) -> bool:
    """Whether they are within what other kernels of the same operators make of float32: a share `apart` of each value,
    a tenth of that of the largest one, and `least`."""
    return torch.allclose(x, y, rtol=apart, atol=0.1 * apart * float(y.abs().max()) + least)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Without it Inductor adds up embedding gradients with atomics: two runs of one graph differ in the last bit."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
