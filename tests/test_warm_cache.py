"""A second process on a warm compile cache trains to the same losses although no pass runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssd_fx.runtime.engines.extents import STEP
from tests import fresh

SCRIPT = """
import gc, json, sys, time
from pathlib import Path
import torch
import ssd_fx
from ssd_fx.passes import pipeline
from tests.inductor import graphs_cached_in, kernels_on_demand

runs = []
original = pipeline.decide_joint
def counted(*args, **kwargs):
    runs.append(1)
    return original(*args, **kwargs)
pipeline.decide_joint = counted
torch.manual_seed(0)
x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
def model(x):
    y = torch.nn.functional.dropout((x @ w).sin(), 0.1)
    return ((y @ w).exp() @ w).tanh().sum()
compiled = torch.compile(model, backend=ssd_fx.backend, options=json.loads(sys.argv[2]))
seen = []
with graphs_cached_in(Path(sys.argv[1])), kernels_on_demand():
    for _ in range(3):
        loss = compiled(x)
        loss.backward()
        seen += [loss, x.grad, w.grad]
stats = ssd_fx.stats()
sums = [t.double().sum().item() for t in seen]
disk = [stats.disk_bytes]
del loss
torch._dynamo.reset()
gc.collect()
until = time.perf_counter() + 10
while ssd_fx.stats().disk_bytes and time.perf_counter() < until:
    time.sleep(0.01)
disk.append(ssd_fx.stats().disk_bytes)
print(json.dumps({"disk": disk, "graphs": sorted(stats.graphs),
                  "passes": len(runs), "sums": sums, "stores": stats.stores, "saved": stats.saved_bytes,
                  "written": stats.written_bytes + stats.cancelled_bytes}))
"""


def in_a_process_of_its_own(cache: Path, options: dict[str, object]) -> dict[str, Any]:
    """What training says; other processes have left their graphs in `cache`."""
    done = fresh.run(SCRIPT, cache, json.dumps(options))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_second_process_behaves_the_same_and_other_options_do_not_meet_its_entry(tmp_path: Path) -> None:
    options: dict[str, object] = {"dirs": [str(tmp_path)], "budget": 0, "min_bytes": 0}
    cold, warm, kept = (
        in_a_process_of_its_own(tmp_path / "cache", each) for each in (options, options, options | {"budget": 1.0})
    )
    assert cold.pop("passes") == 1
    assert warm.pop("passes") == 0
    assert cold["stores"] != 0
    assert cold == warm
    assert warm["disk"] == [STEP, 0]  # the store ended with the graph, which no pass of ours has seen
    assert (kept["passes"], kept["stores"], kept["sums"]) == (1, 0, cold["sums"])
    assert kept["graphs"] != cold["graphs"]
