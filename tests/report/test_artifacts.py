"""What PyTorch's own tools show: a structured trace for tlparse, and TORCH_LOGS."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import fresh

TRAIN = """
import {first}, {second}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
options = {{"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0}}
torch.compile(model, backend="ssd_fx", options=options)(torch.randn(4, 8)).sum().backward()
"""


def train(first: str, **environment: str) -> str:
    """What the script prints, with torch or ssd_fx imported `first`."""
    code = TRAIN.format(first=first, second="torch" if first == "ssd_fx" else "ssd_fx")
    done = fresh.ended("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_trace_and_the_plan_in_a_line(tmp_path: Path) -> None:
    said = train("torch", TORCH_LOGS="ssd_fx", TORCH_TRACE=str(tmp_path))
    assert re.search(r"graph [0-9a-f]{8}: \d alias groups, \d+ B saved, ", said)
    assert "predicted step" not in said
    (trace,) = tmp_path.iterdir()
    records = [
        json.loads(line[line.index("{") :]) for line in trace.read_text().splitlines() if '"artifact": {' in line
    ]
    found = {r["artifact"]["name"]: r for r in records if r["artifact"]["name"].startswith("ssd_fx_")}
    assert {"ssd_fx_summary", "ssd_fx_plan", "ssd_fx_plan_json", "ssd_fx_00_joint"} <= set(found)
    assert {"ssd_fx_02_partition_forward", "ssd_fx_04_insert_forward"} <= set(found)
    assert all(r["frame_id"] == 0 and r["has_payload"] for r in found.values())  # tlparse sorts by frame
    payload = re.search(r"ssd_fx_summary.*\n((?:\t.*\n)+)", trace.read_text())
    assert payload
    assert json.loads(payload[1])["offloaded_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch", "ssd_fx"])
def test_the_whole_plan(first: str) -> None:
    """PyTorch reads TORCH_LOGS when it is imported, and takes the name of any package that can be imported."""
    assert "predicted step" in train(first, TORCH_LOGS="+ssd_fx")


@pytest.mark.slow
def test_nothing_is_said_unasked() -> None:
    assert "alias groups" not in train("torch")
