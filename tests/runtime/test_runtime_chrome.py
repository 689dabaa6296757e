"""The trace as Chrome's JSON."""

import json
import os
import time

import pytest
import torch

from ssd_fx.runtime import chrome, trace
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.stores import close_stores
from tests.runtime.fake_gpu import installed
from tests.runtime.harness import load, release, store

MEMORY = json.dumps({"engine": "memory"})
N = 50_000


def complete(path):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_every_event_with_its_times_and_place(config, tmp_path):
    x = torch.randn(N)
    before = time.time() * 1e6
    h = store(x, config, slot=3)
    release(h, x)
    load(h, x)
    assert chrome.export(tmp_path / "trace.json") == len(trace.events())
    after = time.time() * 1e6
    events = complete(tmp_path / "trace.json")
    assert [e["name"] for e in events if e["name"].startswith(("store", "release", "load", "wait"))] == [
        "store slot 3",
        "release slot 3",
        "load slot 3",
        "wait slot 3",
    ]
    for event in events:
        assert event["pid"] == os.getpid()
        assert before <= event["ts"] <= event["ts"] + event["dur"] <= after
        assert event["args"]["engine"] == "posix"
        assert event["args"]["nbytes"] == 4 * N


def test_memory_is_counted_at_every_node(config, tmp_path):
    CPU_ALLOCATOR.install()
    x = torch.randn(1 << 20)
    load(store(x, config), x)
    chrome.export(tmp_path / "trace.json")
    counted = [
        e["args"]["bytes"] for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "C"
    ]
    assert counted == [e["args"]["live"] for e in complete(tmp_path / "trace.json") if e["args"]["live"]]
    assert min(counted) >= x.nbytes


def test_transfers_that_overlap_have_rows_of_their_own(tmp_path):
    for slot, (started, ended) in enumerate([(0.0, 2.0), (1.0, 3.0), (2.5, 4.0)]):
        trace.record(trace.Event("write", "g", slot, slot, started, ended, 8, "ok", "posix"))
    chrome.export(tmp_path / "trace.json")
    rows = [e["tid"] for e in complete(tmp_path / "trace.json")]
    assert rows[0] == rows[2] != rows[1]


def test_a_device_has_a_row_of_its_own(tmp_path):
    """What the host launched at once stands apart there by what the device did in between."""
    with installed("lazy") as gpu:
        x = gpu.tensor(torch.randn(N))
        h = store(x, MEMORY)
        gpu.queue(gpu.compute, lambda: None, ms=2000.0)
        release(h, x)
        assert chrome.export(tmp_path / "trace.json") == len(trace.events()) + 2
        del h
        close_stores()
    events = complete(tmp_path / "trace.json")
    nodes = [e for e in events if e["name"] in ("store slot 0", "release slot 0")]
    stored, released = (e for e in nodes if e["args"]["where"] != "cpu")
    stored_there, released_there = (e for e in nodes if e["args"]["where"] == "cpu")
    assert stored["tid"] == released["tid"] != stored_there["tid"] == released_there["tid"]
    assert released["ts"] - stored["ts"] < 1e6
    assert released_there["ts"] - stored_there["ts"] == pytest.approx(2e6, abs=1e4)


def test_beside_the_profiler(config, tmp_path):
    """One file, one clock: our load lies within the profiler's range around it."""
    x = torch.randn(N)
    h = store(x, config)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler, torch.profiler.record_function("around"):
        load(h, x)
        time.sleep(0.01)
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    chrome.export(tmp_path / "both.json", profile=tmp_path / "torch.json")
    events = complete(tmp_path / "both.json")
    [around] = [e for e in events if e["name"] == "around"]
    [ours] = [e for e in events if e["name"] == "load slot 0"]
    slack_us = 1000  # torch.profiler's clock is converted from a cycle counter
    assert around["ts"] - slack_us < ours["ts"]
    assert ours["ts"] + ours["dur"] < around["ts"] + around["dur"] + slack_us


@pytest.mark.parametrize("content", ["[]", "{}", "no json", '{"traceEvents": 1, "baseTimeNanoseconds": 1}'])
def test_what_is_no_trace(tmp_path, content):
    (tmp_path / "wrong.json").write_text(content)
    with pytest.raises(ValueError, match=r"wrong\.json is no trace of torch\.profiler"):
        chrome.export(tmp_path / "trace.json", profile=tmp_path / "wrong.json")
