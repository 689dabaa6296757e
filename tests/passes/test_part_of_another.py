"""Saved tensors that Inductor computes into a part of another one, or takes out of one, where the caller then writes.

The partition's storages do not show it, and the generated code makes a new tensor of the part, with a version counter
of its own. So a write of the caller before the backward must change no gradient, or end in autograd's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ssd_fx
from ssd_fx.passes.lowering import inductor
from ssd_fx.passes.planner import select
from tests.inductor import kernels_on_demand

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


def late(points: Callable[..., Any]) -> Callable[..., Any]:
    """Every store behind the last kernel, as a plan for a busy drive may have it."""

    def planned(plan: Any, *rest: Any) -> Any:
        last = len(plan.timeline.forward) - 3
        return dataclasses.replace(points(plan, *rest), store_after=last, release_after=last)

    return planned


@pytest.mark.parametrize("budget", ["1GiB", 0], ids=["it rests in memory", "it is written"])
@pytest.mark.parametrize("stored", ["as planned", "late"])
@pytest.mark.parametrize("step", STEPS)
def test_a_write_of_the_caller_changes_no_gradient(
    step: Step, stored: str, budget: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In four steps: from the third on a slot is not written any more, if the caller holds its memory."""
    torch._dynamo.reset()
    if stored == "late":
        monkeypatch.setattr(select, "_points", late(select._points))
    options = {"dirs": [tmp_path], "allow_tmpfs": True, "budget": budget, "min_bytes": 0, "recompute": False}
    options |= {"machine": {"write_bw": 5e7, "read_bw": 5e9}}
    expected = gradients(step, step)
    with kernels_on_demand(), torch._inductor.config.patch(force_disable_caches=True):
        run = torch.compile(step, backend=ssd_fx.backend, options=options, dynamic=False)
        for _ in range(4):
            for found, right in zip(gradients(step, run), expected, strict=True):
                assert (found is None) == (right is None)
                assert found is None or right is None or torch.allclose(found, right, atol=1e-6)
    assert ssd_fx.stats().offloaded_bytes > 0


@pytest.mark.parametrize("step", STEPS)
def test_the_audit_refuses_a_part_that_is_stored(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the copy that the lowering makes."""
    torch._dynamo.reset()
    monkeypatch.setattr(select, "_points", late(select._points))
    monkeypatch.setattr(inductor, "_is_in_memory_of_another", lambda *_: False)
    options = {"dirs": [tmp_path], "allow_tmpfs": True, "budget": 0, "min_bytes": 0, "recompute": False}
    with kernels_on_demand(), torch._inductor.config.patch(force_disable_caches=True):
        run = torch.compile(step, backend=ssd_fx.backend, options=options | {"machine": "default"}, dynamic=False)
        with pytest.raises(Exception, match=r"is stored as a part of .* that the caller may write into"):
            gradients(step, run)
