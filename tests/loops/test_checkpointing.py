"""Activation checkpointing: around compiled modules, within them, and selective. What is still saved goes to disk.

Dropout under a checkpoint: tests/test_models.py. Policies that ask for offloading: tests/test_marks.py. PyTorch's own
memory budget: tests/test_recompute.py.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ssd_fx
from tests.bitwise import Compile, kept, ours, prove_bitwise, stock
from tests.loops.loops import (
    ACTIVATION_BYTES,
    WIDTH,
    Loop,
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    backward,
    batch,
    gradients,
    on_disk,
    run,
)
from tests.unlike import DYNAMIC_STAYS

Region = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def through(region: Region, *, compile_blocks: bool) -> Loop:
    """Every block of a net is called through `region`; the blocks are compiled, or all of it is."""

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(dropout=0.0)  # the state of the generator, 5 KB that stay, would be most of what a checkpoint saves
        blocks = [compile(block) for block in model.blocks] if compile_blocks else list(model.blocks)

        def forward(x: Tensor) -> Tensor:
            for block in blocks:
                x = x + region(block, x)
            return x.square().mean()

        step = forward if compile_blocks else compile(forward)
        seen = []
        for i in range(2):
            x = batch(i).requires_grad_()
            loss = step(x)
            backward(loss)
            assert x.grad is not None
            seen += [loss.detach(), x.grad]
        return seen + gradients(model)

    return loop


def checkpointed(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


def reentrant(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def test_around_compiled_blocks(tmp_path: Path) -> None:
    """The forward that runs again in the backward stores for it once more; nothing of the first run stays."""
    stats = assert_no_bit_changes(through(reentrant, compile_blocks=True), tmp_path)
    assert stats.read_bytes + stats.forwarded_bytes + stats.held_bytes >= stats.offloaded_bytes // 2


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_compiled_within_a_checkpoint_stays(tmp_path: Path, inner: str) -> None:
    """It is dropped by the first run, and wanted at once by the backward of the second."""
    loop = through(checkpointed, compile_blocks=True)
    with pytest.warns(RuntimeWarning, match=r"keeps all tensors.*within torch\.utils\.checkpoint"):
        prove_bitwise(loop, [ours(on_disk(tmp_path, inner, budget=1.0)), ours(on_disk(tmp_path, inner))])
    assert ssd_fx.stats().stores == 0


def one_element(x: Tensor, w: Tensor) -> Tensor:
    """What is saved has one element of a larger tensor, so its strides say nothing."""
    v = (x @ w).cumsum(0).cumsum(1)[-1:, -1:]
    return (v.sin() * v.tanh()).sum()


def product(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return (h.sin() * h).sum()


REFUSED = {
    "leaves": r"^an ssd_fx handle of shape .* is none: what the forward saved was exchanged",
    "stays": r"^a backward was given an ssd_fx handle of shape .* for a tensor that its own graph keeps",
}


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("first", "f", "compiled_autograd"),
    [
        ("leaves", one_element, False),
        ("leaves", product, True),
        pytest.param("stays", one_element, True, marks=DYNAMIC_STAYS),
        pytest.param("stays", product, False, marks=DYNAMIC_STAYS),
    ],
)
def test_a_checkpoint_that_runs_another_graph_again_is_refused(
    tmp_path: Path, inner: str, first: str, f: Callable[..., Tensor], compiled_autograd: bool
) -> None:
    """The graph for dynamic sizes keeps what the one before stored, or the other way round: no wrong value comes."""
    options = {"dirs": [str(tmp_path)], "inner": inner, "min_bytes": 0, "recompute": False}
    w = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    compiled = torch.compile(f, backend="ssd_fx", options=options)
    x = batch(0).requires_grad_()
    other = batch(0, 48).requires_grad_()
    traced = torch._dynamo.compiled_autograd._enable(torch.compile(backend="ssd_fx", options=options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if first == "stays":
            loss = checkpointed(lambda x: compiled(x, w), x)  # keeps all, for it is compiled here
            compiled(other, w).backward()
        else:
            compiled(x, w).backward()
            loss = checkpointed(lambda x: compiled(x, w), x)
            checkpointed(lambda x: compiled(x, w), other)  # the graph for dynamic sizes keeps all
    assert ssd_fx.stats().stores > 0
    # Inductor's code compares strides before anything else. Those of a handle of one element may be any.
    by_strides = inner == "inductor" and not compiled_autograd and (f is product or first == "stays")
    said = r"^expected size \d+==\d+, stride" if by_strides else REFUSED[first]
    compiler = traced if compiled_autograd else contextlib.nullcontext()
    with pytest.raises((RuntimeError, AssertionError), match=said), compiler:
        loss.backward()


@pytest.mark.parametrize(
    ("compiled", "recompute"),
    [("before", False), pytest.param("before", True, marks=pytest.mark.slow), ("within", True)],
)
def test_around_blocks_of_one_code_with_sizes_that_change(tmp_path: Path, compiled: str, recompute: bool) -> None:
    """What runs again in the backward may be the graph for dynamic sizes. A checkpoint compares what both runs save.

    The first graph's tensors have 8 KiB and would leave; those of the second one have 6 when it is compiled. Compiled
    within the checkpoint both keep all, or the backward of the one would get what the other stored.
    """

    def loop(compile: Compile) -> list[Tensor]:
        model = Net(dropout=0.0)
        blocks = [compile(block) for block in model.blocks]
        for x in (batch(64), batch(48, 48)) if compiled == "before" else ():
            for block in blocks:
                block(x.requires_grad_()).sum().backward()
        seen = []
        for sizes in ((64, 48), (48, 64), (32, 48, 64)):
            inputs = [batch(size, size).requires_grad_() for size in sizes]
            losses = []
            for x in inputs:
                for block in blocks:
                    x = x + checkpointed(block, x)
                losses.append(x.square().mean())
            for loss in losses:
                backward(loss)
            seen += [x.grad for x in inputs if x.grad is not None]
        return seen + gradients(model)

    options = on_disk(tmp_path, recompute=recompute, min_bytes=7 << 10)
    prove_bitwise(loop, [kept(options), ours(options)])
    stats = ssd_fx.stats()
    assert stats.stores > stats.loads > 0 if compiled == "before" else stats.stores == 0


def test_what_autograd_saves_looks_as_without_us(tmp_path: Path) -> None:
    """Shapes, dtypes and devices of what pack hooks are given, which a checkpoint compares."""

    def packed(backend: str, options: dict[str, Any] | None) -> list[tuple[object, ...]]:
        torch._dynamo.reset()
        seen: list[tuple[object, ...]] = []

        def pack(x: Tensor) -> Tensor:
            seen.append((tuple(x.shape), x.dtype, x.device))
            return x

        model = Net(dropout=0.0)
        step = torch.compile(lambda x: model(x.bfloat16().float().chunk(2)[0]), backend=backend, options=options)
        for size in (64, 48, 32):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                loss = step(batch(0, size))
            loss.backward()
        return seen

    options = {"dirs": [str(tmp_path)], "inner": "aot_eager", "min_bytes": 0, "recompute": False}
    assert packed("ssd_fx", options) == packed("aot_eager", None)
    assert ssd_fx.stats().loads > 0


class Running(nn.Module):
    """A running mean, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.mul_(0.5).add_(y.detach().mean(0))
        return y.sin() * self.seen  # type: ignore[no-any-return]


def test_a_buffer_is_changed_again_when_a_checkpoint_computes_again(tmp_path: Path) -> None:
    """In the graph, for the checkpoint ends its second forward as soon as it has what the backward needs."""

    def loop(compile: Compile) -> list[Tensor]:
        model, x = Running(), torch.randn(4, 6)
        checkpoint(compile(model), x, use_reentrant=False).sum().backward()
        return [model.seen]

    prove_bitwise(loop, [stock("aot_eager"), ours(on_disk(tmp_path))])


def test_hooks_that_are_compiled_into_the_graph_get_tensors(tmp_path: Path) -> None:
    """AOTAutograd calls hooks that are graphs on what is saved, so nothing of such a graph is exchanged."""
    pack = torch.fx.symbolic_trace(lambda x: x.to(torch.bfloat16))
    unpack = torch.fx.symbolic_trace(lambda x: x.to(torch.float32))
    for hook in (pack, unpack):
        next(iter(hook.graph.nodes)).meta["user_cache_hash"] = "same"  # as PyTorch asks of such hooks

    def loop(compile: Compile) -> tuple[Tensor, ...]:
        x, w = batch(0).requires_grad_(), batch(1, WIDTH)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = compile(product)(x, w)
        return torch.autograd.grad(loss, [x])

    with pytest.warns(RuntimeWarning, match="keeps all tensors.*saved_tensors_hooks"):
        prove_bitwise(loop, [stock("aot_eager"), ours(on_disk(tmp_path))])


@pytest.mark.slow
def test_under_inductor(tmp_path: Path) -> None:
    assert_no_bit_changes(through(checkpointed, compile_blocks=False), tmp_path, "inductor")


class Chain(nn.Module):
    """linear -> tanh -> sin, three times, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sin()
        return x


@pytest.mark.parametrize("saved", [0, 3])
def test_selective(tmp_path: Path, saved: int) -> None:
    """SAC that saves the matrix products, or nothing: those and the input of the region leave, and nothing else."""
    operators: list[Any] = [torch.ops.aten.mm.default] if saved else []
    context = functools.partial(create_selective_checkpoint_contexts, operators)

    def loop(compile: Compile) -> list[Tensor]:
        chain = Chain()

        def forward(x: Tensor) -> Tensor:
            out: Tensor = checkpoint(chain, x.cos(), use_reentrant=False, context_fn=context)
            return out.sum()

        loss = compile(forward)(batch(0).requires_grad_())
        backward(loss)
        return [loss.detach(), *gradients(chain)]

    stats = assert_no_bit_changes(loop, tmp_path)
    assert_all_read_back(stats)
    run(loop, tmp_path)
    inputs = 2  # x, and its cosine, which the region gets
    assert ssd_fx.stats().saved_bytes == (saved + inputs) * ACTIVATION_BYTES
