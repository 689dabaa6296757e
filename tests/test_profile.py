"""Measured times: from the trace of a run to a file, and from the file into the next plan."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx.passes import pipeline
from ssd_fx.passes.plan import Plan
from ssd_fx.profile import read_profile
from ssd_fx.runtime import trace


def event(kind: str, seq: int, started: float, ended: float, nbytes: int = 0, where: str = "disk") -> None:
    trace.record((kind, "g", 0, seq, started, ended, nbytes, where, "posix"))


def run(at: float, forward_s: float, backward_s: float) -> None:
    """begin, store behind a stretch of compute, release behind another; load, wait; the ops block for 100 s each."""
    event("begin", -1, at, at + 1)
    event("store", 0, at + 1 + forward_s, at + 101 + forward_s)
    event("release", 1, at + 101 + 2 * forward_s, at + 201 + 2 * forward_s)
    event("write", -1, at, at + 2, 1000, "ok")
    event("write", -1, at + 1, at + 4, 1000, "ok")
    event("write", -1, at + 4, at + 400, 1000, "cancelled")
    event("load", 0, at + 300, at + 400)
    event("wait", 1, at + 400 + backward_s, at + 500 + backward_s)


def test_blocked_time_is_left_out_and_the_first_run_is_cold(tmp_path: Path) -> None:
    trace.positions["g"] = "4,7,9|2,5|6000"
    run(0, 50.0, 50.0)
    for number, (forward_s, backward_s) in enumerate([(2.0, 5.0), (3.0, 6.0), (9.0, 7.0)], start=1):
        run(1000 * number, forward_s, backward_s)
    event("begin", -1, 9000, 9001)  # a run that is not complete
    assert ssd_fx.save_profile(tmp_path / "p.json") == 1
    profile = read_profile(tmp_path / "p.json")
    assert profile.graphs[0].forward == ((4, 0.0), (7, 3000.0), (9, 6000.0))
    assert profile.graphs[0].backward == ((2, 0.0), (5, 6000.0))
    assert profile.scale == 2.0  # 12 s in both directions where the roofline says 6
    assert (profile.write_bw, profile.read_bw) == (500.0, 0.0)  # 8,000 bytes while a write was under way, 4 s each


def test_nothing_ran(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no graph with offloaded tensors has run"):
        ssd_fx.save_profile(tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


NO_TIMES = '{"version": 2, "graphs": {"g": %s}, "write_bw": 0, "read_bw": 0, "scale": 1}'
NO_PROFILES = {
    "empty": "",
    "a list": "[]",
    "nothing": "{}",
    "another version": '{"version": 7}',
    "no times": NO_TIMES % "{}",
    "descending": NO_TIMES % '{"forward": [[3, 1], [2, 2]], "backward": []}',
}


@pytest.mark.parametrize("text", NO_PROFILES.values(), ids=NO_PROFILES)
def test_what_is_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"p\.json' is no profile; right would be a file that ssd_fx.save"):
        read_profile(path)
    with pytest.raises(ValueError, match="missing' is no profile"):
        read_profile(tmp_path / "missing")


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x @ w).sin() @ w).exp().sum()


def test_a_run_s_times_are_in_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Train, save, compile again: the timeline goes through the measured anchors. Another model ignores them."""
    plans: list[Plan] = []
    original = pipeline.decide

    def kept(*args: object, **kwargs: object) -> Plan:
        plans.append(original(*args, **kwargs))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(pipeline, "decide", kept)
    options: dict[str, object] = {"dirs": [str(tmp_path)], "min_bytes": 0, "inner": "aot_eager"}
    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def train(function: object, **more: object) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=ssd_fx.backend, options=options | more)  # type: ignore[call-overload]
        for _ in range(3):
            compiled(x, w).backward()

    train(model)
    path = tmp_path / "p.json"
    assert ssd_fx.save_profile(path) == 1
    (graph, found), *_ = json.loads(path.read_text())["graphs"].items()
    assert graph == plans[0].graph
    train(model, profile=str(path))
    assert plans[1].graph == graph
    timeline = plans[1].timeline
    assert timeline is not None
    for starts, anchors in ((timeline.forward, found["forward"]), (timeline.backward, found["backward"])):
        (first, first_ms), (last, last_ms) = anchors[0], anchors[-1]
        assert starts[last] - starts[first] == pytest.approx(last_ms - first_ms)
    with caplog.at_level(logging.INFO, logger="ssd_fx"):
        train(lambda x, w: model(x, w).cos(), profile=str(path))
    assert f"graph {plans[2].graph} is not in the profile, whose graphs are {graph}: another model" in caplog.text
