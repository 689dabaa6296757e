"""Saved tensors that Inductor computes into a part of another one, or takes out of one, where the caller then writes.

The partition's storages do not show it, and the generated code makes a new tensor of the part, with a version counter
of its own. So a write of the caller before the backward must change no gradient, or end in autograd's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import ssd_fx
from ssd_fx.passes.lowering import inductor
from ssd_fx.passes.planner import select

N = 64
Step = Callable[..., tuple[Tensor, Tensor]]  # what the caller writes into, and the loss


def piece_of_a_cat(p: Tensor, q: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`x` is computed right into the output, unless its layout is fixed before."""
    x = torch.tanh(p + q + r)
    return torch.cat([x, w * 2.0]), (x * w).sum()


def part_of_a_scatter(p: Tensor, q: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A pass behind the partitioner takes `upper` for a slice of the output (`canonicalize_view_scatter_ops`)."""
    y = p @ q
    upper = torch.slice_scatter(y[: N // 2], r[: N // 2, : N // 4], 1, 0, N // 4)
    return torch.slice_scatter(y, upper, 0, 0, N // 2), (upper * w[: N // 2]).sum()


def view_of_an_input(p: Tensor, q: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The copy is taken out, and `index_put_` writes into the caller's tensor."""
    p.view(-1).index_put_((torch.arange(N),), q[:, 0])
    return q * 2.0, (p.clone() * w).sum()


# Outputs that are made of a stored tensor, by what Inductor may take out, compute in place, or lay out in pieces.
MADE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clone": lambda x, s: x.clone(),
    "times 1": lambda x, s: x * 1,
    "plus 0": lambda x, s: x + 0,
    "cat of one": lambda x, s: torch.cat([x]),
    "cat behind": lambda x, s: torch.cat([s * 2, x]),
    "cat of columns": lambda x, s: torch.cat([x, s * 2], 1),
    "cat of views": lambda x, s: torch.cat([x.view(-1), (s * 2).view(-1)]),
    "cat of a slice": lambda x, s: torch.cat([x[: N // 2], s * 2]),
    "cat of itself": lambda x, s: torch.cat([x, x]),
    "cat of parts": lambda x, s: torch.cat(x.split(N // 2)),
    "cat of a padding": lambda x, s: torch.cat([F.pad(x, (0, 0, 0, 2)), s * 2]),
    "slice of a cat": lambda x, s: torch.cat([x, s]).narrow(0, 0, N).clone(),
    "stack": lambda x, s: torch.stack([x, s * 2]),
    "stack of one": lambda x, s: torch.stack([x]),
    "stack of rows": lambda x, s: torch.stack(x.unbind(0)),
    "repeat": lambda x, s: x.repeat(1, 1),
    "padding by 0": lambda x, s: F.pad(x, (0, 0)),
    "padding": lambda x, s: F.pad(x, (0, 0, 0, 1)),
    "transposed twice": lambda x, s: x.t().contiguous().t(),
    "copy of a dtype": lambda x, s: x.to(x.dtype, copy=True),
    "filled": lambda x, s: torch.empty_like(x).copy_(x),
    "where": lambda x, s: torch.where(torch.ones_like(x, dtype=torch.bool), x, s),
    "narrow": lambda x, s: x.narrow(0, 0, N).clone(),
    "roll by 0": lambda x, s: x.roll(0, 0),
    "slice_scatter": lambda x, s: (s * 2).slice_scatter(x, 0, 0, N),
    "rows by number": lambda x, s: x[torch.arange(N)],
    "index_put": lambda x, s: (s * 2).index_put((torch.arange(N),), x),
    "index_copy": lambda x, s: (s + 1).index_copy(0, torch.arange(N), x),
    "expanded by 1": lambda x, s: x.expand(1, N, N).clone(),
    "no dropout": lambda x, s: F.dropout(x, 0.0),
    "maximum": lambda x, s: torch.maximum(x, x - 1),
    "block_diag": lambda x, s: torch.block_diag(x, s),
}


def output_of(make: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def made(p: Tensor, q: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(p + q + r)
        return make(x, w), (x * w).sum()

    return made


STEPS: tuple[Step, ...] = (piece_of_a_cat, part_of_a_scatter, view_of_an_input)


def gradients(step: Step, run: Step) -> list[Tensor | None]:
    """Of a backward before which the caller writes."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(N, N, generator=generator) for _ in range(4)]
    for x in given[3:] if step is view_of_an_input else given:
        x.requires_grad_()
    written, loss = run(*given)
    with torch.no_grad():
        (given[0] if step is view_of_an_input else written).zero_()
    loss.backward()
    return [x.grad for x in given]


def late(of_nodes: Callable[..., Any]) -> Callable[..., Any]:
    """Every store behind the last kernel, as a plan for a busy drive may have it."""

    def planned(plan: Any, *rest: Any) -> Any:
        last = len(plan.node_ms[0]) - 3
        return of_nodes(plan, *rest).edited(lambda _, trip: trip.moved(store=last, release=last), plan.items)

    return planned


@pytest.mark.parametrize(
    ("stored", "budget"), [("as planned", 0), ("late", "1GiB")], ids=["written as planned", "late, and rests in memory"]
)
@pytest.mark.parametrize("step", STEPS)
def test_a_write_of_the_caller_changes_no_gradient(
    step: Step, stored: str, budget: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In four steps: from the third on a slot is not written any more, if the caller holds its memory."""
    torch._dynamo.reset()
    if stored == "late":
        monkeypatch.setattr(select, "_of_nodes", late(select._of_nodes))
    for found in trained(step, budget, tmp_path):
        assert is_close(found, gradients(step, step))
    assert ssd_fx.stats().offloaded_bytes > 0


def trained(step: Step, budget: str | int, directory: Path) -> Iterator[list[Tensor | None]]:
    """The gradients of four steps."""
    options = {"dirs": [directory], "allow_tmpfs": True, "budget": budget, "min_bytes": 0, "recompute": False}
    options |= {"machine": {"write_bw": 5e7, "read_bw": 5e9}}
    with torch._inductor.config.patch(force_disable_caches=True):
        run = torch.compile(step, backend=ssd_fx.backend, options=options, dynamic=False)
        for _ in range(4):
            yield gradients(step, run)


def is_close(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    alike = all((ours is None) == (right is None) for ours, right in pairs)
    return alike and all(a is None or b is None or torch.allclose(a, b, atol=1e-6) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1GiB", 0], ids=["it rests in memory", "it is written"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE.keys())
def test_an_output_that_is_made_of_a_stored_tensor(
    make: Callable[[Tensor, Tensor], Tensor], budget: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is eager's. Autograd's error comes only where plain Inductor has it too."""
    torch._dynamo.reset()
    monkeypatch.setattr(select, "_of_nodes", late(select._of_nodes))
    step = output_of(make)
    expected = unless_refused(lambda: gradients(step, step))
    if not expected:
        pytest.skip("eager mode refuses it")
    plain = unless_refused(lambda: gradients(step, torch.compile(step, dynamic=False)))
    if plain and not is_close(plain, expected):
        pytest.skip("plain Inductor has another gradient, and no error")
    steps = unless_refused(lambda: list(trained(step, budget, tmp_path)))
    assert ssd_fx.stats().offloaded_bytes > 0
    assert all(is_close(found, expected) for found in steps) if steps else not plain


def unless_refused(run: Callable[[], list[Any]]) -> list[Any]:
    """What `run` returns, or nothing if autograd has seen the write."""
    try:
        return run()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return []


@pytest.mark.parametrize("step", STEPS)
def test_the_audit_refuses_a_part_that_is_stored(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copy that the lowering makes."""
    torch._dynamo.reset()
    monkeypatch.setattr(select, "_of_nodes", late(select._of_nodes))
    monkeypatch.setattr(inductor, "_is_in_memory_of_another", lambda *_: False)
    options = {"dirs": [tmp_path], "allow_tmpfs": True, "budget": 0, "min_bytes": 0, "recompute": False}
    with torch._inductor.config.patch(force_disable_caches=True):
        run = torch.compile(step, backend=ssd_fx.backend, options=options | {"machine": "default"}, dynamic=False)
        with pytest.raises(BackendCompilerFailed, match=r"VerifyError: .* is stored as a part of .* may write into"):
            gradients(step, run)
