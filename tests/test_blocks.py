"""A graph per block: hidden states are inputs of one graph and outputs of another, and the caller has them in hand."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ssd_fx
from ssd_fx.runtime.entries import living
from tests import sources
from tests.bitwise import assert_same_bits
from tests.models import Residual
from tests.planned_order import assert_in_planned_order

WIDTH, BATCH, BLOCKS = 64, 256, 4
HIDDEN = BATCH * WIDTH * 4


def blocks(tmp_path: object, inner: str = "aot_eager", **options: Any) -> list[Any]:
    torch.manual_seed(0)
    options = {"dirs": [str(tmp_path)], "min_bytes": HIDDEN, "allow_tmpfs": True, "inner": inner} | options
    return [torch.compile(Residual(WIDTH, 2), backend=ssd_fx.backend, options=options) for _ in range(BLOCKS)]


def step(model: list[Any], keep: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Loss and gradients; `keep` gets every hidden state, as `output_hidden_states=True` would."""
    x = torch.linspace(-1, 1, BATCH * WIDTH).view(BATCH, WIDTH).requires_grad_()
    leaf = x
    for block in model:
        x = block(x)
        if keep is not None:
            keep.append(x)
    loss = x.square().mean()
    del x
    loss.backward()
    found = [loss.detach(), leaf.grad, *(p.grad for block in model for p in block.parameters())]
    for block in model:
        block.zero_grad()
    return [t for t in found if t is not None]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hidden_states_leave_and_come_back(tmp_path: object, inner: str) -> None:
    """Bitwise; every hidden state but the leaf is written, and its memory is gone."""
    expected = step(blocks(tmp_path, inner, engine="memory"))
    model = blocks(tmp_path, inner)
    ssd_fx.reset_stats()
    for _ in range(3):
        assert_same_bits(step(model), expected)
    stats = ssd_fx.stats()
    assert stats.held_bytes == 3 * HIDDEN  # the leaf
    assert stats.wasted_bytes == 0
    assert stats.written_bytes + stats.cancelled_bytes + stats.held_bytes == stats.offloaded_bytes
    assert_in_planned_order()


def test_reads_run_ahead_into_the_next_block(tmp_path: object) -> None:
    """All but the first backward, whose tensors are asked for one by one, find theirs read or on the way."""
    model = blocks(tmp_path, prefetch=64 * HIDDEN)
    step(model)
    ssd_fx.reset_stats()
    step(model)
    stats = ssd_fx.stats()
    assert stats.offloaded_bytes > 0
    first = stats.read_bytes - stats.prefetched_bytes
    assert first <= stats.offloaded_bytes // BLOCKS
    assert stats.prefetched_bytes + stats.forwarded_bytes >= (stats.offloaded_bytes * (BLOCKS - 1)) // BLOCKS


def test_a_caller_that_keeps_every_hidden_state(tmp_path: object) -> None:
    """Writing them frees nothing: after two steps they are no longer written. The rest still is."""
    model, keep = blocks(tmp_path), []
    for _ in range(2):
        step(model, keep)
    ssd_fx.reset_stats()
    expected = step(model, keep)
    stats = ssd_fx.stats()
    assert stats.held_bytes == BLOCKS * HIDDEN
    assert stats.wasted_bytes == 0
    assert 0 < stats.written_bytes + stats.cancelled_bytes == stats.offloaded_bytes - BLOCKS * HIDDEN
    assert_same_bits(step(blocks(tmp_path, engine="memory")), expected)


@pytest.mark.parametrize("source", ["", "given_away", "resident", "read"])
def test_a_hidden_state_that_is_changed_in_place(tmp_path: object, source: str) -> None:
    """The same error as in eager mode (no source), whether the write was done, or had begun, or not."""
    torch.manual_seed(0)
    with sources.SOURCES[source].forced() if source else nullcontext({}) as options:
        model = blocks(tmp_path, **options) if source else [Residual(WIDTH, 2) for _ in range(BLOCKS)]
        x = model[0](torch.randn(BATCH, WIDTH))
        y = model[1](x)
        stored = [entry for entry in living() if entry.ptr == x.data_ptr()]
        x.data.add_(0)  # .data asks for no check, here as there
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* at version 1; expected version 0"):
            y.sum().backward()
    assert [entry.state.where for entry in stored] == {"": [], "read": ["disk"]}.get(source, ["memory"])


@pytest.mark.parametrize("bytes_", [0, 4 * HIDDEN, 10 * HIDDEN])
def test_one_budget_over_all_graphs(tmp_path: object, bytes_: int) -> None:
    """The graphs share it: once a step has been seen, the oldest tensors leave at once and the latest stay."""
    model = blocks(tmp_path, budget=f"{bytes_}B", prefetch=0)
    step(model)
    ssd_fx.reset_stats()
    step(model)
    stats = ssd_fx.stats()
    left = stats.offloaded_bytes - stats.held_bytes - bytes_  # but for the leaf, and what fits
    assert stats.written_bytes + stats.cancelled_bytes == left > 0


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inputs_that_alias_in_the_first_call_only(tmp_path: Path, inner: str) -> None:
    """Nothing guards that: what was compiled with x and a view of it is also called with two tensors of their own."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() * y.view(-1)).square().sum()

    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "inner": inner, "dump": str(tmp_path)}
    compiled = torch.compile(product, backend=ssd_fx.backend, options=options)

    def gradients(function: Any, shared: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(1000, requires_grad=True) for _ in range(2)]
        x = leaves[0] * 2
        y = x.view(10, 100) if shared else (leaves[1] * 3).view(10, 100)
        function(x, y).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for shared in (True, False):
        for a, b in zip(gradients(compiled, shared), gradients(product, shared), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    (plan,) = tmp_path.glob("*.plan.txt")
    assert "keep  inputs that alias" in plan.read_text()


class Unchecked(torch.autograd.Function):
    """Saves its input past autograd's check."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.x.cos()


@pytest.mark.parametrize("backend", ["aot_eager", "ssd_fx"])
def test_an_input_that_is_saved_without_a_check(tmp_path: Path, backend: str) -> None:
    """The backward sees what is there then, as it does without offload."""
    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "inner": "aot_eager", "dump": str(tmp_path)}
    chosen: Any = (
        {"backend": "aot_eager"} if backend == "aot_eager" else {"backend": ssd_fx.backend, "options": options}
    )
    compiled = torch.compile(Unchecked.apply, **chosen)
    leaf = torch.ones(1000, requires_grad=True)
    x = leaf * 2
    y = compiled(x)
    with torch.no_grad():
        x.fill_(1.0)
    y.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, torch.full((1000,), 2.0).mul(torch.tensor(1.0).cos()))
    reasons = [plan.read_text().count("keep  saved without a version check") for plan in tmp_path.glob("*.plan.txt")]
    assert reasons == ([1] if backend == "ssd_fx" else [])
