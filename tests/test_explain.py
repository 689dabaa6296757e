"""`ssd_fx.explain`: plans and rewritten graphs as values, as a test of a toy wants them."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssd_fx
from ssd_fx.report.dump import Explanation
from tests import fresh
from tests.passes import toys

TOY = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0, "recompute": False}


def test_a_toy() -> None:
    (found,) = ssd_fx.explain(toys.relu_chain, options=TOY)(*toys.inputs()).dumps
    assert str(found).startswith(f"graph {found.graph}: 3 alias groups, 768 B saved, 3 groups and 768 B offloaded")
    inputs, (relu,) = found.plan["groups"][:2], found.plan["groups"][2:]
    assert [group["source"] for group in inputs] == ["argument x", "argument w"]
    assert (relu["name"], relu["decision"], relu["load"]) == ("relu", "offload", "threshold_backward")
    assert found.forward.count("ssd_fx.store.default(") == 3
    assert found.backward.count("ssd_fx.load.default(") == 3


@pytest.mark.parametrize("recompute", [False, True])
def test_a_budget_in_bytes_says_what_stays_at_run_time(recompute: bool) -> None:
    told = "up to 512 B of what is offloaded stay in memory at run time, the latest of all graphs; "
    told += "this plan counts on none of it"
    for budget, shared in (("512B", 512), (0.5, None), (0, None)):
        options = TOY | {"budget": budget, "recompute": recompute}
        (found,) = ssd_fx.explain(toys.relu_chain, options=options)(*toys.inputs()).dumps
        assert (told in found.table) == (shared is not None)
        assert found.plan["predicted"].get("shared_budget_bytes") == shared


def test_the_graphs_around_a_break_come_in_their_order() -> None:
    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).relu() @ w
        torch._dynamo.graph_break()
        return (y @ w).sigmoid()

    first, second = ssd_fx.explain(broken, options=TOY)(*toys.inputs()).dumps
    assert "relu" in first.table
    assert "sigmoid" not in first.table
    assert first.graph != second.graph


def test_what_the_inputs_are_called() -> None:
    """In whatever they are handed over; of the model's own tensors only buffers are saved at times."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((8, 8), 2.0))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return (batch["tokens"] * batch["mask"] * self.scale).sum()

    x, w = toys.inputs()
    (found,) = ssd_fx.explain(Scaled(), options=TOY)({"tokens": x, "mask": w}).dumps
    sources = [group["source"] for group in found.plan["groups"]]
    assert {"argument batch['tokens']", "argument batch['mask']"} <= set(sources)


def test_a_model_with_inductor_and_keyword_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 16), nn.Sigmoid(), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return self.down(self.act(self.up(x))) * scale

    said = TOY | {"inner": "inductor", "keep": ["act"]}
    (found,) = ssd_fx.explain(Model(), options=said, fullgraph=True)(torch.randn(8, 8), scale=2.0).dumps
    assert "keep=['act']" in found.table


def test_with_inductor_and_a_dump_only_the_report_is_made(tmp_path: Path) -> None:
    """No plan is written, so there is no folder for Inductor's code."""
    said = TOY | {"inner": "inductor", "dump": str(tmp_path)}
    assert len(ssd_fx.explain(toys.relu_chain, options=said)(*toys.inputs()).dumps) == 1
    assert list(tmp_path.iterdir()) == []


def test_as_often_as_one_likes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo gives a function up that it compiled eight times; this one still compiles, and no directory is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(10):
        assert len(ssd_fx.explain(toys.relu_chain, options=TOY)(*toys.inputs()).dumps) == 1
    assert list(tmp_path.glob("ssd_fx-explain-*")) == []
    ssd_fx.reset_stats()
    torch.compile(toys.relu_chain, backend=ssd_fx.backend, options=TOY)(*toys.inputs()).sum().backward()
    assert ssd_fx.stats().stores == 3


def test_nothing_to_explain() -> None:
    explained = ssd_fx.explain(toys.relu_chain, options=TOY)
    with pytest.raises(ValueError, match=r"^no graph of relu_chain was compiled for a backward"):
        explained(*(x.detach() for x in toys.inputs()))
    with torch.no_grad(), pytest.raises(ValueError, match=r"^no graph of Sequential was compiled"):
        ssd_fx.explain(nn.Sequential(nn.Linear(8, 8)), options=TOY)(toys.inputs()[0])


def test_it_counts_for_nobody() -> None:
    """`stats()` would say that new drives last for as long as those of another training."""
    before = ssd_fx.stats()
    ssd_fx.explain(toys.relu_chain, options=TOY | {"drive_tbw": before.drive_tbw + 5})(*toys.inputs())
    assert ssd_fx.stats() == before


def test_threads_explain_in_turn() -> None:
    """Else the one that begins drops the plans of the other."""
    within, done = threading.Event(), threading.Event()

    @torch.compiler.disable
    def wait(x: torch.Tensor) -> torch.Tensor:
        within.set()
        done.wait(1.0)
        return x

    def other() -> None:
        within.wait()
        dumps.extend(ssd_fx.explain(toys.relu_chain, options=TOY)(*toys.inputs()).dumps)
        done.set()

    dumps: list[Explanation] = []
    thread = threading.Thread(target=other)
    thread.start()
    own = ssd_fx.explain(lambda x, w: wait((x @ w).sigmoid()).tanh(), options=TOY)(*toys.inputs()).dumps
    thread.join()
    assert ["sigmoid" in dump.table for dump in own] == [True, False]
    assert ["relu" in dump.table for dump in dumps] == [True]


FORKED = """
import os, sys, threading, torch, ssd_fx

@torch.compiler.disable
def wait(x):
    within.set()
    forked.wait()
    return x

within, forked = threading.Event(), threading.Event()
x = torch.ones(4, 4, requires_grad=True)
options = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0}
thread = threading.Thread(target=ssd_fx.explain(lambda x: wait(x.sin()), options=options), args=(x,))
thread.start()
within.wait()
child = os.fork()
if not child:
    os._exit(len(ssd_fx.explain(lambda x: x.sin(), options=options)(x).dumps) != 1)
forked.set()
thread.join()
print(os.waitpid(child, 0)[1])
"""


def test_a_child_that_was_forked_while_another_thread_explained() -> None:
    done = fresh.run(FORKED, timeout_s=60)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


def test_bad_options_at_once() -> None:
    with pytest.raises(ValueError, match="no option 'bugdet'; did you mean 'budget'"):
        ssd_fx.explain(toys.relu_chain, options={"bugdet": 0})


def test_the_state_of_a_generator_is_named() -> None:
    """A checkpoint's backward draws its numbers again from it, and knows it by another name."""

    def within(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((x @ w).sin(), 0.5) @ w

    def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(within, x, w, use_reentrant=False).sum()

    found = ssd_fx.explain(dropped, options=TOY)(*toys.inputs())
    size = torch.get_rng_state().nbytes
    assert (size, "the state of a random number generator") in [(r["nbytes"], r["reason"]) for r in found.rows()]
