"""The other arguments of `torch.compile`, and graphs that break.

`dynamic=True` over several lengths: tests/passes/test_dynamic.py. A graph per block, and reading ahead into the next
block: tests/test_blocks.py.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, config, list_mode_options
from torch._subclasses import FakeTensorMode

import ssd_fx
from ssd_fx.compat import inductor
from ssd_fx.passes.lowering.order import PinOrder
from ssd_fx.passes.lowering.settings import warn_no_cuda_graphs
from tests import bitwise
from tests.bitwise import Compile, assert_same_bits
from tests.loops.loops import (
    BATCH,
    Loop,
    Net,
    assert_all_read_back,
    assert_no_bit_changes,
    batch,
    gradients,
    run,
    seen_in_steps,
)
from tests.unlike import DYNAMIC_STAYS


def trained(make: Callable[[], nn.Module], *batches: Tensor, **arguments: Any) -> Loop:
    """A step for each of `batches`; `arguments` are those of torch.compile."""

    def loop(compile: Compile) -> list[Tensor]:
        model = make()
        compiled = compile(model, **arguments)
        return seen_in_steps(model, lambda step: compiled(batches[step].clone()), len(batches))

    return loop


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fullgraph(tmp_path: Path, inner: str) -> None:
    stats = assert_no_bit_changes(trained(Net, batch(0), batch(1), fullgraph=True), tmp_path, inner)
    assert_all_read_back(stats)
    assert len(stats.graphs) == 1


class Branching(nn.Module):
    """Breaks twice, and goes one way or the other as the data says; hidden states cross from graph to graph."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.positive, self.negative, self.after = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).tanh()
        torch._dynamo.graph_break()
        h = h + h.sin()
        side = self.positive if h.sum().item() > 0 else self.negative
        return (self.after(side(h).exp()) * h).square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_graph_breaks(tmp_path: Path, inner: str) -> None:
    """Each part is a graph of its own, compiled when it first runs."""
    x = batch(0)
    loop = trained(Branching, x, -x, x, -x)
    stats = assert_no_bit_changes(loop, tmp_path, inner)
    assert_all_read_back(stats)
    assert stats.steps >= 4
    eager = loop_uncompiled(Branching, x, -x, x, -x)
    for ours, theirs in zip(run(loop, tmp_path, inner), eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def loop_uncompiled(make: Callable[[], nn.Module], *batches: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return trained(make, *batches)(lambda model: model)


def test_fullgraph_refuses_a_break_as_stock_does(tmp_path: Path) -> None:
    def complaint(**chosen: Any) -> str:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            torch.compile(Branching(), fullgraph=True, **chosen)(batch(0))
        return str(caught.value).split("\n", 1)[0]

    assert complaint(backend="ssd_fx", options={"dirs": [str(tmp_path)]}) == complaint(backend="inductor")


@DYNAMIC_STAYS
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_last_batch_is_smaller(tmp_path: Path, dynamic: bool | None) -> None:
    """With `dynamic=None` torch compiles for the second size with a symbol in its place."""
    batches = [batch(0), batch(1), batch(2, size=BATCH // 2 + 5), batch(3)]
    stats = assert_no_bit_changes(trained(Net, *batches, dynamic=dynamic), tmp_path)
    assert_all_read_back(stats)
    assert len(stats.graphs) == (1 if dynamic else 2)
    assert sum(graph.steps for graph in stats.graphs.values()) == len(batches)


def by_mode(mode: str, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: str) -> list[Tensor]:
    """torch.compile takes a mode or options; with a mode the options come from the environment."""
    for name, value in {"dirs": str(directory), "min_bytes": "0", **options}.items():
        monkeypatch.setenv(f"SSD_FX_{name.upper()}", value)
    loop = trained(lambda: Net(blocks=1), batch(0), batch(1))
    return bitwise.run(loop, lambda model: torch.compile(model, backend="ssd_fx", mode=mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """They are Inductor's: on a CPU `reduce-overhead`, which is CUDA graphs, changes nothing."""
    kept = by_mode(mode, tmp_path, monkeypatch, engine="memory")
    assert_same_bits(by_mode(mode, tmp_path, monkeypatch, engine="posix"), kept)
    assert_all_read_back(ssd_fx.stats())
    assert ssd_fx.stats().written_bytes > 0.9 * ssd_fx.stats().saved_bytes


@pytest.mark.skipif("lite" not in list_mode_options(), reason="this torch has no lite mode")
def test_lite_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all is a call of ATen there. The backward relies on the strides of a convolution's result."""
    monkeypatch.setenv("SSD_FX_DIRS", str(tmp_path))

    def trained_with(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3))
        loss = torch.compile(model, backend=backend, mode="lite")(torch.randn(4, 3, 12, 12)).square().sum()
        loss.backward()
        return [loss, *gradients(model)]

    ours = functools.partial(ssd_fx.backend, options={"min_bytes": 0, "budget": 0, "recompute": False})
    # what was read back has other strides than what was kept, and a convolution rounds by them
    torch.testing.assert_close(trained_with(ours), trained_with("inductor"))
    assert ssd_fx.stats().written_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["combo_kernels", "cpp_wrapper"])
def test_settings_of_inductor(tmp_path: Path, setting: str) -> None:
    """Combo kernels are left out, for they cross the planned order; in C++ a release waits for its write."""
    loop = trained(lambda: Net(blocks=1), batch(0), batch(1))
    with config.patch({setting: True}), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        stats = assert_no_bit_changes(loop, tmp_path, "inductor")
    assert_all_read_back(stats)
    assert stats.written_bytes > 0.9 * stats.saved_bytes
    assert any("every release of ssd_fx waits" in str(w.message) for w in told) == (setting == "cpp_wrapper")


@dataclass
class Counted:
    """A pass of the user, which has no `uuid`."""

    calls: int = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.calls += 1
        return nodes


def test_the_user_s_passes_of_the_scheduler_run_too(tmp_path: Path) -> None:
    before, behind = Counted(), Counted()
    with config.patch({"_pre_fusion_custom_pass": before, "_post_fusion_custom_pass": behind}):
        compiled = torch.compile(lambda x: (x @ x).sin().sum(), backend="ssd_fx", options={"dirs": [str(tmp_path)]})
        compiled(torch.ones(4, 4, requires_grad=True)).backward()
    assert (before.calls, behind.calls) == (2, 2)  # forward and backward


def test_another_partitioner_is_refused() -> None:
    with (
        config.patch(custom_partitioner_fn=object()),
        pytest.raises(ValueError, match="custom_partitioner_fn is set, and ssd_fx is a partitioner; unset it"),
    ):
        torch.compile(lambda x: x.sin(), backend="ssd_fx")(batch(0))


def test_a_mode_reaches_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings are in force when Inductor compiles, beside ours."""
    seen: list[dict[str, Any]] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any], **_: object) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(inductor, "compile_fx", compiler)
    monkeypatch.setenv("SSD_FX_DIRS", str(tmp_path))
    for mode in ("reduce-overhead", "max-autotune"):
        torch._dynamo.reset()
        torch.compile(lambda x: x.sin(), backend="ssd_fx", mode=mode)(batch(0))
        assert seen[-1].items() >= (list_mode_options(mode) | {"triton.cudagraphs": False}).items()
        assert isinstance(seen[-1]["_post_fusion_custom_pass"], PinOrder)
    assert list_mode_options("reduce-overhead") == {"triton.cudagraphs": True}


def test_a_region_that_asks_for_cuda_graphs_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = pytest.importorskip("torch._dynamo.decorators").__dict__.get("override_cudagraphs")
    if override is None:
        pytest.skip("this torch has no override_cudagraphs")
    seen: list[bool] = []
    decided = compile_fx.create_compiler_config_extra

    def spy(gm: torch.fx.GraphModule) -> Any:
        seen.append(bool(decided(gm).cudagraphs))
        return decided(gm)

    def in_region(x: Tensor) -> Tensor:
        with override(fwd=True, bwd=True):
            return x.sin()

    monkeypatch.setattr(compile_fx, "create_compiler_config_extra", spy)
    monkeypatch.setenv("SSD_FX_DIRS", str(tmp_path))
    for backend, graphs in (("inductor", True), ("ssd_fx", False)):
        torch._dynamo.reset()
        torch.compile(in_region, backend=backend)(batch(0))
        assert seen.pop() is graphs


def test_cuda_graphs_are_left_out_aloud(recwarn: pytest.WarningsRecorder) -> None:
    """On a CPU nobody asks for them; on a GPU a write that is late would read what the next replay puts there."""
    warn_no_cuda_graphs([batch(0)])
    assert not recwarn
    with FakeTensorMode(), pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        warn_no_cuda_graphs([torch.empty(1, device="cuda")])
