"""A model that Dynamo skips trains uncompiled, and nobody says so but the counters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ssd_fx

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
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", SKIPPED], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("nothing ran: torch.compile has not called ssd_fx in this process")


def test_what_is_said_once_a_graph_was_compiled() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend=ssd_fx.backend, options=TOY)
    before = ssd_fx.stats().compiled_graphs
    with torch.no_grad():
        compiled(torch.randn(8, 8))
    assert ssd_fx.stats().compiled_graphs == before + 1
    assert "none has begun a forward that saves for a backward" in str(ssd_fx.stats())
    compiled(torch.randn(8, 8)).sum().backward()
    assert str(ssd_fx.stats()).startswith("1 steps, 1 graphs")
    ssd_fx.reset_stats()
    assert str(ssd_fx.stats()).startswith(f"nothing ran since the start or the last reset_stats(): of the {before + 2}")
