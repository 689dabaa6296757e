"""Loops with `ssd_fx.checkpoint` around the blocks, in eager mode and compiled one by one: to the bit PyTorch's.

Programs with one checkpoint or a few, and what it stores of them: tests/test_checkpoints.py. Hugging Face:
tests/trainers. FSDP2: tests/distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable
from torch.utils.checkpoint import set_checkpoint_early_stop

import ssd_fx
from ssd_fx.runtime.entries import living
from tests.bitwise import prove_bitwise, run
from tests.compatibility import Result, record
from tests.faults.toys import settle
from tests.loops.loops import ACTIVATION_BYTES, Net, backward, batch, current_test, gradients, parameters
from tests.test_checkpoints import TORCHS, Broken

Region = Callable[..., Any]
Loop = Callable[[Region, Net], list[Tensor]]
BLOCKS, STEPS = 3, 3
INNERS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def trained(loop: Loop, inner: str) -> Callable[[Region], list[Tensor]]:
    """A program (tests/bitwise.py) of the checkpoint that it is given."""

    def program(region: Region) -> list[Tensor]:
        # compiled code and eager mode draw other numbers
        net = Net(BLOCKS, dropout=0.1 if inner == "eager" else 0.0)
        for block in net.blocks if inner != "eager" else ():
            block.compile(backend=inner)
        return loop(region, net)

    return program


def assert_as_pytorchs(loop: Loop, directory: Path, inner: str, *, stored: int) -> None:
    """`stored`: inputs that leave memory in all steps. All of them come back from disk."""
    options = {"dirs": [str(directory)], "min_bytes": 0, "allow_tmpfs": True}
    prove_bitwise(trained(loop, inner), [TORCHS, partial(ssd_fx.checkpoint, options=options)])
    stats = ssd_fx.stats()
    record(Result("training loops", current_test(), inner, stats.saved_bytes, stats.written_bytes))
    assert stats.stores == stored
    assert stats.written_bytes + stats.held_bytes == stored * ACTIVATION_BYTES
    assert living() == []


def loss_of(region: Region, net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = x + region(block, x)
    return x.square().mean()


@pytest.mark.parametrize("inner", INNERS)
def test_gradient_accumulation(tmp_path: Path, inner: str) -> None:
    """Micro-batches with a backward each, and an optimizer behind the last one."""

    def loop(region: Region, net: Net) -> list[Tensor]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        seen = []
        for step in range(STEPS):
            for micro in range(2):
                loss = loss_of(region, net, batch(2 * step + micro))
                backward(loss)
                seen.append(loss.detach())
            seen += gradients(net)
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *parameters(net)]

    assert_as_pytorchs(loop, tmp_path, inner, stored=2 * STEPS * BLOCKS)
    assert {graph.steps for graph in ssd_fx.stats().graphs.values()} == {2 * STEPS}, "names are those of a micro-batch"


@pytest.mark.parametrize("order", ["first in, first out", "last in, first out"])
@pytest.mark.parametrize("inner", INNERS)
def test_several_forwards_before_the_first_backward(tmp_path: Path, inner: str, order: str) -> None:
    def loop(region: Region, net: Net) -> list[Tensor]:
        seen = []
        for step in range(STEPS):
            losses = [loss_of(region, net, batch(4 * step + micro)) for micro in range(4)]
            for loss in losses if order.startswith("first") else reversed(losses):
                backward(loss)
            seen += [*(loss.detach() for loss in losses), *gradients(net)]
            net.zero_grad()
        return seen

    assert_as_pytorchs(loop, tmp_path, inner, stored=4 * STEPS * BLOCKS)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("early", [True, False], ids=["early stop", "to the end"])
def test_nested(tmp_path: Path, inner: str, early: bool) -> None:
    """What is stored are the inputs of the outer checkpoint; within it the checkpoints are PyTorch's."""

    def loop(region: Region, net: Net) -> list[Tensor]:
        seen = []
        for step in range(STEPS):
            x = batch(step).requires_grad_()
            with set_checkpoint_early_stop(early):
                loss = region(partial(loss_of, region, net), x * 1)
            backward(loss)
            assert x.grad is not None
            seen += [loss.detach(), x.grad]
        return [*seen, *gradients(net)]

    assert_as_pytorchs(loop, tmp_path, inner, stored=STEPS)


@pytest.mark.parametrize("inner", INNERS)
def test_an_exception_in_the_recomputation(tmp_path: Path, inner: str) -> None:
    """The step is lost, and those behind it are right."""

    def loop(region: Region, net: Net) -> list[Tensor]:
        seen = []
        calls = 0

        def fails(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 4:  # in the backward of the second step
                raise Broken
            return x.sin()

        for step in range(STEPS):
            x = batch(step).requires_grad_()
            first, *others = net.blocks
            y = region(fails, region(first, x * 1))
            for block in others:
                y = y + region(block, y)
            loss = y.square().mean()
            settle()
            try:
                loss.backward()
            except Broken:
                net.zero_grad()
                del loss
                continue
            assert x.grad is not None
            seen += [loss.detach(), x.grad]
        assert len(seen) == 2 * (STEPS - 1)
        return [*seen, *gradients(net)]

    assert_as_pytorchs(loop, tmp_path, inner, stored=STEPS * (BLOCKS + 1))


def under_compiled_autograd(compiler: dict[str, Any]) -> Loop:
    def loop(region: Region, net: Net) -> list[Tensor]:
        net.eval()
        seen = []
        for step in range(STEPS):
            loss = loss_of(region, net, batch(step))
            settle()
            with _enable(torch.compile(**compiler)):
                loss.backward()
            seen.append(loss.detach())
        return [*seen, *gradients(net)]

    return loop


OURS = {"backend": "ssd_fx", "options": {"inner": "aot_eager", "engine": "memory"}}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [{"backend": "eager"}, OURS], ids=["eager", "ssd_fx"])
def test_compiled_autograd(tmp_path: Path, compiler: dict[str, Any]) -> None:
    """The backward of all checkpoints is one graph, which loads between its parts."""
    assert_as_pytorchs(under_compiled_autograd(compiler), tmp_path, "eager", stored=STEPS * BLOCKS)


def test_compiled_autograd_by_another_compiler_is_refused(tmp_path: Path) -> None:
    """It makes the waits functional, and would compute with what is not loaded."""
    region = partial(ssd_fx.checkpoint, options={"dirs": [str(tmp_path)], "min_bytes": 0, "allow_tmpfs": True})
    with pytest.raises(RuntimeError, match="name ssd_fx as the backend of compiled autograd too"):
        run(trained(under_compiled_autograd({"backend": "aot_eager"}), "eager"), region)
