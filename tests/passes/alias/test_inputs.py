"""Inputs of unusual layout, as one compiled region hands them to the next: stored whole, or kept with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx.runtime.entries import living
from tests.bitwise import Compile, kept, ours, prove_bitwise
from tests.faults.toys import settle

Make = Callable[[torch.Tensor], torch.Tensor]


def squares(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().sum() + (x * x).sum()


def magnitudes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ x).abs().sum() + w.sum()


INPUTS: dict[str, tuple[Callable[..., torch.Tensor], Make, str]] = {
    "dense": (squares, lambda b: (b.view(16, 8) * 2)[:8].clone(), "256 B  offload"),
    "offset": (squares, lambda b: (b.view(16, 8) * 2)[8:], "256 of 512 B  offload"),
    "expanded": (
        squares,
        lambda b: (b[:1, :8] * 2).expand(8, 8),
        "32 B  keep     no dense tensor holds the bytes needed",
    ),
    "gaps": (squares, lambda b: (b * 2)[:, :8], "512 B  keep     no dense tensor holds the bytes needed"),
    "overlapping": (
        squares,
        lambda b: (b.view(-1) * 2)[:36].unfold(0, 8, 4),
        "512 B  keep     no dense tensor holds the bytes needed",
    ),
    "lazy_conjugate": (
        magnitudes,
        lambda b: torch.complex(b[:, :8] * 1, b[:, 8:]).conj(),
        "512 B  keep     input with a lazy conjugate or negation",
    ),
}


def gradients(function: Callable[..., torch.Tensor], make: Make, compile: Compile) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(8, 16, generator=generator).requires_grad_()
    w = torch.randn(8, 8, generator=generator).requires_grad_()
    compile(function)(make(base), w).backward()
    assert base.grad is not None
    assert w.grad is not None
    return [base.grad, w.grad]


@pytest.mark.parametrize(("function", "make", "row"), INPUTS.values(), ids=INPUTS.keys())
def test_inputs(function: Callable[..., torch.Tensor], make: Make, row: str, tmp_path: Path) -> None:
    options = {"inner": "aot_eager", "engine": "memory", "min_bytes": 0, "budget": 0}
    prove_bitwise(partial(gradients, function, make), [kept(options), ours(options, dump=str(tmp_path))])
    (plan,) = tmp_path.glob("*.plan.txt")
    (line,) = [line for line in plan.read_text().splitlines() if line.startswith("primals_1 ")]
    assert " ".join(row.split()) in " ".join(line.split())


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sin().sum()


@pytest.mark.parametrize(("budget", "where"), [("1GiB", "memory"), (0, "disk")])
@pytest.mark.parametrize(("inner", "kind"), [("aot_eager", "dense"), ("aot_eager", "offset"), ("inductor", "dense")])
def test_an_input_that_is_changed_before_the_backward_is_an_error(
    inner: str, kind: str, budget: str | int, where: str, tmp_path: Path
) -> None:
    """As without ssd_fx. The version counter must be the caller's, and not that of a view which Inductor makes."""
    torch._dynamo.reset()
    x, w = INPUTS[kind][1](torch.randn(8, 16)), torch.randn(8, 8, requires_grad=True)
    options = {"inner": inner, "min_bytes": 0, "budget": budget, "dirs": [tmp_path], "allow_tmpfs": True}
    y = torch.compile(product, backend=ssd_fx.backend, options=options | {"machine": "default"})(x, w)
    (stored,) = (entry for entry in living() if entry.ptr == x.data_ptr())
    if where == "disk":
        settle()
    (x if x._base is None else x._base).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    assert stored.state.where == where
