"""A model that Dynamo skips trains uncompiled, and nobody says so but the counters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ssd_fx
from ssd_fx.report.describe import OUTPUT
from ssd_fx.runtime.stats import Stats
from tests import fresh

TOY = {"inner": "aot_eager", "engine": "memory", "min_bytes": 0}

SKIPPED = """
import torch, ssd_fx
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
model.compile(backend="ssd_fx", options={"inner": "aot_eager", "engine": "memory", "min_bytes": 0})
model(torch.randn(8, 8)).sum().backward()
print(ssd_fx.stats())
"""


@pytest.mark.slow
def test_a_module_of_torch_itself_that_is_compiled_in_place() -> None:
    done = fresh.ended("-c", SKIPPED)
    assert done.stdout.startswith("nothing ran: torch.compile has not called ssd_fx in this process")


def test_what_is_said_once_a_graph_was_compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend=ssd_fx.backend, options=TOY)
    before = ssd_fx.stats().compiled_graphs
    ssd_fx.reset_stats()
    with torch.no_grad():
        compiled(torch.randn(8, 8))
    assert ssd_fx.stats().compiled_graphs == before + 1
    said = str(ssd_fx.stats())
    assert said.startswith("nothing ran since the start or the last reset_stats(): of the 1 graphs")
    assert "none has begun a forward that saves activations for a backward" in said
    compiled(torch.randn(8, 8)).sum().backward()
    assert str(ssd_fx.stats()).startswith("1 steps, 1 graphs")
    ssd_fx.reset_stats()
    said = f"called ssd_fx since the last reset_stats(), and none of the {before + 2} graphs before ran, so whatever"
    assert said in str(ssd_fx.stats())


def test_a_recurrent_network_and_its_cure() -> None:
    """Dynamo leaves a whole model with an LSTM to eager mode, where `ssd_fx.checkpoint` takes its input."""
    lstm, head = nn.LSTM(8, 8), nn.Linear(8, 8)
    compiled = torch.compile(lambda x: head(lstm(x)[0]).sum(), backend=ssd_fx.backend, options=TOY)
    ssd_fx.reset_stats()
    compiled(torch.randn(4, 2, 8)).backward()
    assert "a model with nn.LSTM, nn.GRU or nn.RNN (right would be to compile its other modules" in str(ssd_fx.report())
    part = torch.compile(nn.Sequential(head, nn.Tanh()), backend=ssd_fx.backend, options=TOY)
    x = torch.randn(4, 2, 8) * 1
    part(ssd_fx.checkpoint(lstm, x, options={"engine": "memory", "min_bytes": 0})[0]).sum().backward()
    assert len(ssd_fx.stats().graphs) == 2


def test_graphs_within_a_checkpoint_are_named() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled = torch.compile(block, backend=ssd_fx.backend, options=TOY)
    before = ssd_fx.stats()
    ssd_fx.reset_stats()
    with pytest.warns(RuntimeWarning, match="within torch.utils.checkpoint"):
        checkpoint(compiled, torch.randn(4, 8), use_reentrant=False).sum().backward()
    now = ssd_fx.stats()
    assert now.whole_graphs == before.whole_graphs + 1
    reason = "it is compiled within torch.utils.checkpoint, which computes again what is saved; ssd_fx.checkpoint "
    reason += "in its place takes its inputs to the drive"
    counts = counts_of(now)
    said = f"{counts} run as without ssd_fx, and keep everything in memory: {reason}"
    assert f"not counted: {said}" in str(now)
    square = torch.compile(lambda x: x.square().sum(), backend=ssd_fx.backend, options=TOY)
    square(torch.randn(8, 8).requires_grad_() * 1).backward()
    assert str(ssd_fx.stats()).endswith(f"not counted: {said.replace(counts, counts_of(ssd_fx.stats()))}")


def counts_of(now: Stats) -> str:
    return f"{now.whole_graphs} of {now.compiled_graphs} compiled graphs"


def test_a_graph_that_saves_its_output_only_ran() -> None:
    compiled = torch.compile(lambda x: x.tanh(), backend=ssd_fx.backend, options=TOY)
    ssd_fx.reset_stats()
    for _ in range(3):
        compiled(torch.randn(8, 8).requires_grad_()).sum().backward()
    assert str(ssd_fx.stats()).startswith("3 steps, 1 graphs")
    (graph,) = ssd_fx.report().graphs
    assert [(row.nbytes, row.reason) for row in graph.rows] == [(256, OUTPUT)]
