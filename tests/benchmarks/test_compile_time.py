"""The clock around the pipeline: it sees every pass and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import growth
import pytest
import torch
from compile_time import Clock, installed, module_name
from torch import fx, nn

import ssd_fx
from ssd_fx.backend import plan_options
from ssd_fx.config import Config
from ssd_fx.passes import decide, partitioner, pipeline, proposals
from ssd_fx.passes.cost import roofline
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.joint import recompute
from ssd_fx.passes.lowering import order
from ssd_fx.passes.verify.graphs import verify_graphs
from ssd_fx.passes.verify.plan import verify_plan


def functions() -> list[object]:
    from_partitioner = (partitioner.Partitioner.__call__, recompute.Joint._cut)
    from_pipeline = (decide.analyses, decide.decisions, proposals.decide, pipeline.insert, decide.fingerprint)
    return [*from_partitioner, *from_pipeline, verify_plan, verify_graphs, order.PinOrder.__call__]


def test_every_pass_is_timed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """linear -> relu -> linear under aot_eager; the input and `relu` are saved."""
    nodes, min_cut = [], recompute.min_cut_rematerialization_partition

    def counting(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        nodes.append(len(gm.graph.nodes))
        return min_cut(gm, *args, **kwargs)

    monkeypatch.setattr(recompute, "min_cut_rematerialization_partition", counting)
    before, clock = functions(), Clock()
    options = {"min_bytes": 0, "engine": "memory", "inner": "aot_eager"}
    model = torch.compile(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), backend=ssd_fx.backend, options=options
    )
    with installed(clock):
        model(torch.ones(2, 8)).sum().backward()
    assert functions() == before
    machine = Machine.default(torch.device("cpu"), 1)
    plan = plan_options(Config.make(options), torch.device("cpu"))
    decisions = decide.decisions(plan, machine, 0, priced=False, saved=(), quick=False)
    passes = [module_name(each) for each in decide.analyses(plan, machine) + decisions]
    timed = [growth.FIRST_CUT, "name", passes[0], "verify", *passes[1:], "insert", growth.PLANNING]
    assert list(clock.seconds) == list(clock.cpu) == timed
    parts = [seconds for name, seconds in clock.seconds.items() if name != growth.PLANNING]
    assert sum(parts) <= clock.seconds[growth.PLANNING]
    assert (clock.nodes, clock.groups) == (nodes[0], 2)


def test_a_pass_goes_by_its_module() -> None:
    assert [module_name(each) for each in (decide.alias, roofline.time)] == ["storages", "roofline"]
