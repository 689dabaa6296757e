"""A GPT trains with its activations on disk, and nothing about it is different."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._dynamo.output_graph import OutputGraph

import ssd_fx
from examples.train_gpt import Shape
from ssd_fx.passes.partitioner import Partitioner
from ssd_fx.runtime import trace
from tests import sources
from tests.bitwise import Compile, kept, ours, prove_bitwise, run, stock
from tests.models import gpt
from tests.runtime.engines import DelayedEngine, around

TINY = Shape(layers=1, width=32, heads=2, seq=32, dropout=0.1)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    """Everything that can leave leaves, however small, to a directory of its own."""
    return {"dirs": [str(tmp_path)], "budget": 0, "min_bytes": 0}


def assert_in_planned_order(runs: int) -> None:
    """Read from the trace: in every graph run our nodes come with seq 0, 1, 2, ... without a gap."""
    seen = [(e.kind, e.seq) for e in trace.events() if e.kind in ("store", "release", "load", "wait")]
    forward = [seq for kind, seq in seen if kind in ("store", "release")]
    backward = [seq for kind, seq in seen if kind in ("load", "wait")]
    assert forward == [*range(len(forward) // runs)] * runs
    assert backward == [*range(len(backward) // runs)] * runs
    assert len(forward) == len(backward) > 0


def test_aot_eager_is_bitwise_everything_kept(options: dict[str, object]) -> None:
    options |= {"inner": "aot_eager"}
    prove_bitwise(gpt(), [kept(options), ours(options)])
    assert_in_planned_order(5)
    stats = ssd_fx.stats()
    assert stats.steps == 5
    assert stats.written_bytes + stats.cancelled_bytes >= 0.9 * stats.saved_bytes
    # What is wanted again before its memory has gone may just have been written.
    assert 0 <= stats.written_bytes - stats.freed_bytes <= stats.forwarded_bytes + stats.wasted_bytes
    assert stats.freed_bytes >= 0.5 * stats.written_bytes  # all of it unless the drive is slow


def test_the_defaults_are_bitwise_everything_kept(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget and recomputing as users have them, which the environment of the tests overrides."""
    for name in ("SSD_FX_BUDGET", "SSD_FX_RECOMPUTE"):
        monkeypatch.delenv(name)
    given = {"inner": "aot_eager", "dirs": options["dirs"], "min_bytes": 0}
    given["machine"] = {"write_bw": 1e12, "read_bw": 1e12, "latency_s": 0.0, "drag_s_per_byte": 0.0}
    prove_bitwise(gpt(), [kept(given), ours(given)])
    stats = ssd_fx.stats()
    assert 0 < stats.offloaded_bytes < stats.saved_bytes


def test_inductor_is_bitwise_the_memory_engine_and_plain_inductor(options: dict[str, object]) -> None:
    program = gpt(shape=TINY)
    on_disk = prove_bitwise(program, [kept(options), ours(options)])
    assert_in_planned_order(2 * 5)
    stats = ssd_fx.stats()
    assert stats.written_bytes + stats.cancelled_bytes >= 0.9 * stats.saved_bytes > 0
    torch.testing.assert_close(on_disk, run(program, stock("inductor")), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_slow_writes_that_finish_in_any_order_change_no_bit(options: dict[str, object], inner: str) -> None:
    """Every write touches its memory 50 to 100 ms late: a buffer that is reused too early shows."""
    options |= {"inner": inner}
    slow = around(DelayedEngine)
    # Few bytes may be in flight: the producer waits, so that most tensors are written and not forwarded.
    prove_bitwise(gpt(3, TINY), [kept(options), ours(options, engine=slow, inflight=1 << 16)])
    stats = ssd_fx.stats()
    assert stats.stall_s > 0.05
    assert stats.read_bytes > 0
    assert stats.forwarded_bytes > 0


def test_a_budget_keeps_that_much(options: dict[str, object]) -> None:
    run(gpt(1), ours(options, inner="aot_eager", budget=0.5))
    stats = ssd_fx.stats()
    assert 0.4 * stats.saved_bytes < stats.offloaded_bytes <= 0.6 * stats.saved_bytes


def layers_trained(compile: Compile) -> list[torch.Tensor]:
    """Losses and gradients of two steps of eight layers, which save eight tanh and the input, 128 KiB each."""
    model = nn.Sequential(*(module for _ in range(8) for module in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 64))
    compiled, seen = compile(model), []
    for _ in range(2):
        model.zero_grad()
        loss = compiled(torch.randn(512, 64)).sum()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return seen


@pytest.mark.parametrize(("rate", "offloaded"), [(1e12, 9), (5e8, 3), (1e6, 0)], ids=["fast", "slow", "hopeless"])
def test_auto_offloads_as_much_as_the_drive_can_take(options: dict[str, object], rate: float, offloaded: int) -> None:
    """Of drives that write and read `rate` bytes per second."""
    options |= {"inner": "aot_eager"}
    machine = {"flops": 1e11, "memory_bw": 1e10, "write_bw": rate, "read_bw": rate, "latency_s": 0.0}
    prove_bitwise(layers_trained, [kept(options), ours(options, budget="auto", machine=machine)])
    stats = ssd_fx.stats()
    assert stats.saved_bytes == 2 * 9 * 512 * 64 * 4
    assert stats.offloaded_bytes == 2 * offloaded * 512 * 64 * 4


def test_inference_and_graphs_that_save_nothing_cost_nothing(options: dict[str, object]) -> None:
    compiled = torch.compile(lambda x: x * 2, backend=ssd_fx.backend, options=options)
    x = torch.ones(8, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        torch.compile(lambda x: (x @ x).sin(), backend=ssd_fx.backend, options=options)(torch.ones(8, 8))
    assert [e for e in trace.events() if e.kind in ("begin", "store")] == []


def curve(t: torch.Tensor) -> torch.Tensor:
    return (t @ t).sin().exp().sum()


def several_streams(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.fx.traceback.annotate({"stream": 1}):  # what Dynamo makes of `torch.cuda.stream(...)`
        h = (x @ w).relu()
    return (h @ w).sum()


def waits_for_an_event(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch.ops.streams.wait_event(1, 2)  # what Dynamo makes of `event.wait()`
    return ((x @ w).relu() @ w).sum()


def waits_for_a_stream(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch.ops.streams.wait_stream.default(1, 2)
    return ((x @ w).relu() @ w).sum()


@pytest.mark.parametrize("loss_of", [several_streams, waits_for_an_event, waits_for_a_stream])
def test_a_graph_that_knows_other_streams_keeps_all(
    loss_of: Callable[..., torch.Tensor], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers follow the current stream. The store of an input would stand before a wait within the graph."""
    found = []

    def compiled(gm: fx.GraphModule, inputs: object, partitioner: Partitioner) -> Callable[..., object]:
        found.append(partitioner.keeps_all)
        return lambda *arguments: (arguments[0].sum(),)  # there are no streams to wait for

    monkeypatch.setattr(sys.modules["ssd_fx.backend"], "_aot_eager", compiled)
    ours = partial(torch.compile, backend=ssd_fx.backend, options=options | {"inner": "aot_eager"})
    with pytest.warns(RuntimeWarning, match="keeps all tensors.*it computes on several streams or waits for one"):
        ours(loss_of)(torch.randn(16, 16), torch.randn(16, 16))
    ours(curve)(torch.randn(16, 16))
    assert found == [True, False]


def test_precompiled_packages_have_nothing_of_ours(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """`caching_precompile` knows a function by its name and line. Another process would train with these options."""
    reasons = []
    monkeypatch.setattr(OutputGraph, "bypass_package", lambda graph, reason="", **more: reasons.append(reason))
    x = torch.randn(16, 16, requires_grad=True)
    with torch._dynamo.config.patch(caching_precompile=True):
        torch.compile(curve, backend=ssd_fx.backend, options=options)(x).backward()
    assert reasons == ["the options of ssd_fx are not in the key of a package"]


def bytes_of_bools(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """A byte of 7 is a true bool, and the backward multiplies by 7."""
    return (a.sin() * x.view(torch.uint8)).sum()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_bools_that_are_read_as_numbers_are_not_compressed(
    options: dict[str, object], inner: str, tmp_path: Path
) -> None:
    """Packed in bits they would all be 0 or 1. Inductor's own code makes them so too."""
    numbers, a = torch.arange(64, dtype=torch.uint8), torch.ones(64, requires_grad=True)
    packed = options | {"inner": inner, "compression": "bitpack", "dump": str(tmp_path / "dump")}
    found = []
    for compiled in (
        torch.compile(bytes_of_bools, backend=inner),
        torch.compile(bytes_of_bools, backend=ssd_fx.backend, options=packed),
    ):
        handed = numbers.clone().view(torch.bool)
        loss = compiled(handed, a)
        del handed  # only the graph has it
        found += torch.autograd.grad(loss, a)
        torch._dynamo.reset()
    assert torch.equal(*found)
    (plan,) = (tmp_path / "dump").glob("*.plan.txt")
    assert "keep     its bools are read as numbers" in plan.read_text()


def test_overlap_scheduling_is_off(options: dict[str, object]) -> None:
    """It would move every wait for a load behind the readers of the tensor."""
    x = torch.randn(16, 16, requires_grad=True)
    compiled = torch.compile(curve, backend=ssd_fx.backend, options=options)
    overlapping = {"aten_distributed_optimizations.enable_overlap_scheduling": True}
    with (
        torch._inductor.config.patch(overlapping),
        pytest.warns(RuntimeWarning, match="without Inductor's overlap scheduling"),
    ):
        (ours,) = torch.autograd.grad(compiled(x), x)
    assert ssd_fx.stats().stores > 0
    torch.testing.assert_close(ours, torch.autograd.grad(curve(x), x)[0])


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_retain_graph_without_donated_buffers(options: dict[str, object], inner: str) -> None:
    """Stock: `donated_buffer=False` allows a second backward. What was forwarded to the first one is still there."""
    with torch._functorch.config.patch(donated_buffer=False):
        x = torch.randn(16, 16, requires_grad=True)
        compiled = ours(options, inner=inner, engine=around(DelayedEngine))(curve)
        compiled(x).backward()  # compiles, so that the next backward follows its forward at once
        ssd_fx.reset_stats()
        loss = compiled(x)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
    assert ssd_fx.stats().forwarded_bytes > 0
    assert torch.equal(first, second)


def test_retain_graph_with_donated_buffers_is_refused(options: dict[str, object]) -> None:
    """As stock does, with the way out in the message."""
    slow = around(DelayedEngine)
    x = torch.randn(16, 16, requires_grad=True)
    options |= {"inner": "aot_eager", "engine": slow}
    compiled = torch.compile(curve, backend=ssd_fx.backend, options=options)
    compiled(x).backward()
    loss = compiled(x)
    assert ssd_fx.stats().offloaded_bytes > ssd_fx.stats().held_bytes
    with pytest.raises(RuntimeError, match="donated_buffer"):
        loss.backward(retain_graph=True)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_two_losses_on_one_graph(inner: str) -> None:
    """The first backward that a graph ever gets keeps it: stock compiles a backward that is donated nothing."""

    def two(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (t @ t).sin().exp()
        return y.sum(), (y * y).sum()

    def gradients(compile: Compile) -> list[torch.Tensor]:
        x = torch.randn(16, 16, requires_grad=True)
        one, other = compile(two)(x)
        first = torch.autograd.grad(one, x, retain_graph=True)
        again = torch.autograd.grad(one, x, retain_graph=True)
        return [*first, *again, *torch.autograd.grad(other, x)]

    given = sources.OPTIONS | {"inner": inner}
    found = prove_bitwise(gradients, [ours(given, budget=1.0), ours(given)], sources.ALL)
    torch.testing.assert_close(found, run(gradients, stock(inner)))


def test_a_batch_of_gradients(options: dict[str, object]) -> None:
    """`is_grads_batched` runs one backward under vmap: the handles are not batched, what is computed with them is."""
    x, batch = torch.randn(16, 16, requires_grad=True), torch.randn(3, 16, 16)

    def steep(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ x).tanh()

    y = torch.compile(steep, backend=ssd_fx.backend, options=options | {"inner": "aot_eager"})(x)
    (found,) = torch.autograd.grad(y, x, batch, is_grads_batched=True)
    expected = [torch.autograd.grad(steep(x), x, each)[0] for each in batch]
    assert ssd_fx.stats().loads > 0
    assert torch.allclose(found, torch.stack(expected), rtol=1e-6)
