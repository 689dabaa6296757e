"""Compiled autograd traces all backward graphs into one and compiles that: our loads and waits are traced with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.utils import counters

import ssd_fx
from ssd_fx.runtime import trace
from tests import sources
from tests.bitwise import Compile
from tests.faults.toys import settle
from tests.loops.loops import Net, assert_all_read_back, assert_no_bit_changes, backward, batch, gradients, run
from tests.passes import toys

INNERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


settle_eagerly = torch._dynamo.disable(settle)


@contextmanager
def compiled_autograd() -> Iterator[None]:
    """Compiled autograd is on, and has compiled a backward in the end. torch.compile must be called within it, too."""
    counters["compiled_autograd"].clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield
    assert counters["compiled_autograd"]["captures"], "no backward was compiled"


def whole_step(compile: Compile) -> list[Tensor]:
    """Forward and backward in one compiled function, as the documentation of compiled autograd has it."""
    return step_of(compile, Net(blocks=1))


def step_of(compile: Compile, model: Net, leaves: list[nn.Parameter] | None = None) -> list[Tensor]:
    """`leaves`: those whose gradient is asked for; None for all."""

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        settle_eagerly()
        loss.backward(inputs=leaves)
        return loss

    with compiled_autograd():
        compiled = compile(step)
        losses = [compiled(batch(i)).detach() for i in range(2)]
    return [*losses, *gradients(model)]


@pytest.mark.parametrize("inner", INNERS)
def test_a_step_with_its_backward(tmp_path: Path, inner: str) -> None:
    assert_all_read_back(assert_no_bit_changes(whole_step, tmp_path, inner))


def test_gradients_are_those_without_compiled_autograd(tmp_path: Path) -> None:
    def plain(compile: Compile) -> list[Tensor]:
        model = Net(blocks=1)
        compiled = compile(model)
        losses = []
        for i in range(2):
            loss = compiled(batch(i))
            backward(loss)
            losses.append(loss.detach())
        return [*losses, *gradients(model)]

    for ours, theirs in zip(run(whole_step, tmp_path), run(plain, tmp_path), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert_all_read_back(ssd_fx.stats())


def test_loads_are_not_moved_to_their_uses(tmp_path: Path) -> None:
    """Inductor sorts inference graphs for locality, which would put every load right before its wait."""
    run(whole_step, tmp_path)
    planned = [e.seq for e in trace.events() if e.kind in ("load", "wait")]
    half = len(planned) // 2
    assert planned == 2 * list(range(half))
    assert half > 2


class Halves(Net):
    """`Net` with a graph break in its middle."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        torch._dynamo.graph_break()
        x = x + self.blocks[1](x)
        return x.square().mean()


def step_of_two_graphs(compile: Compile) -> list[Tensor]:
    """Compiled autograd traces the backwards of two plans into one graph."""
    return step_of(compile, Halves())


@pytest.mark.parametrize("inner", INNERS)
def test_the_backwards_of_two_graphs_in_one(tmp_path: Path, inner: str) -> None:
    assert_no_bit_changes(step_of_two_graphs, tmp_path, inner)


def step_of_some(compile: Compile) -> list[Tensor]:
    """The backward is traced without what only the other gradients need."""
    model = Net(blocks=2)
    return step_of(compile, model, list(model.blocks[1].parameters())[:3])


@pytest.mark.parametrize("inner", INNERS)
def test_gradients_that_nobody_asks_for(tmp_path: Path, inner: str) -> None:
    assert_no_bit_changes(step_of_some, tmp_path, inner)


class ReturnsWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sin())
        return 2 * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0]  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("inner", INNERS)
def test_a_gradient_that_is_a_saved_tensor(inner: str) -> None:
    """Compiled autograd accumulates a gradient as soon as it is there: right behind the load, before the wait."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        deep, here = ReturnsWhatItSaved.apply(x @ w), ReturnsWhatItSaved.apply(x)  # type: ignore[no-untyped-call]
        loss: Tensor = (deep @ w).sum() + here.sum()
        loss.backward()
        return loss

    def gradients_of(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor | None]:
        x, w = toys.inputs(64)
        function(x, w)
        return [x.grad, w.grad]

    expected = gradients_of(step)
    with compiled_autograd():
        compiled = torch.compile(step, backend=ssd_fx.backend, options=sources.OPTIONS | {"inner": inner})
        for source in sources.ALL:
            with source.forced():
                torch.testing.assert_close(gradients_of(compiled), expected, msg=source.name)
                source.check(ssd_fx.stats())


@pytest.mark.parametrize("other", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_another_backend_behind_it_is_refused(tmp_path: Path, other: str) -> None:
    """Nothing pins the order of the loads there, and a wait may be given a copy."""
    options = {"dirs": [str(tmp_path)], "min_bytes": 0}
    ssd_fx.reset_stats()
    loss = torch.compile(lambda x: x.sin().exp().sum(), backend="ssd_fx", options=options)(batch(0).requires_grad_())
    assert ssd_fx.stats().stores == 1  # the input, of which PyTorch computes the rest again
    with _enable(torch.compile(backend=other)), pytest.raises(Exception, match="name ssd_fx as the backend of"):
        loss.backward()
