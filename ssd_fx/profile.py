"""Measured times of the graphs that ran, taken from the runtime's trace, for the next compilation.

    ssd_fx.save_profile("step.json")                                    # after some training steps
    torch.compile(model, backend=ssd_fx.backend, options={"profile": "step.json"})

The trace has the start and end of every node of ours; on a GPU those of CUDA events around it (`device_trace`). Time
between two nodes is compute. Time within a node (a full queue, a late read) is left out. Every `begin_` carries the
positions of our nodes in its graph. So a graph from the compile cache, which no pass saw in this process, is profiled
like any other.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from ssd_fx.passes.cost.profile import Anchors, GraphProfile, Profile
from ssd_fx.runtime import trace
from ssd_fx.runtime.device import device_trace

_VERSION = 2
_RUNS = 16
Run = dict[int, float]  # seq of a node of ours -> ms of compute before it; -1 is begin_


def save_profile(path: str | os.PathLike[str]) -> int:
    """Write the profile of the graphs in the trace to `path`, and return their number.

    Times of graphs on a GPU are those of its compute stream, which this waits for.

    Raises:
        ValueError: the trace has no complete run of any graph.
        OSError: `path` cannot be written.
    """
    events, on_devices = trace.events(), device_trace.events()
    measured = {}
    for name, positions in sorted(trace.positions.items()):
        found = _profile(name, positions, on_devices if device_trace.behind_the_host(name) else events)
        if found:
            measured[name] = found
    if not measured:
        ran = ", ".join(sorted(trace.positions))
        what = f"no run of {ran} is complete" if ran else "no graph with offloaded tensors has run"
        raise ValueError(f"{what} since the trace began; train some more steps first")
    graphs = {name: {"forward": g.forward, "backward": g.backward} for name, g in measured.items()}
    rates = {f"{kind}_bw": _bandwidth(kind, events) for kind in ("write", "read")} | {"scale": _scale(measured)}
    Path(path).write_text(json.dumps({"version": _VERSION, "graphs": graphs} | rates) + "\n")
    return len(graphs)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile that `save_profile` wrote.

    Raises:
        ValueError: the file is missing or was not written by `save_profile`.
    """
    wrong = f"profile={os.fspath(path)!r} is no profile; right would be a file that ssd_fx.save_profile wrote"
    try:
        found = json.loads(Path(path).read_text())
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r}")
        graphs = (
            GraphProfile(name, _pairs(times["forward"]), _pairs(times["backward"]))
            for name, times in sorted(found["graphs"].items())
        )
        return Profile(tuple(graphs), float(found["write_bw"]), float(found["read_bw"]), float(found["scale"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{wrong} ({type(error).__name__}: {error})") from error


def _pairs(given: Iterable[Iterable[float]]) -> Anchors:
    pairs = tuple((int(position), float(ms)) for position, ms in given)
    if list(pairs) != sorted(pairs) or any(b < a for (_, a), (_, b) in pairwise(pairs)):
        raise ValueError("times that do not ascend")
    return pairs


def _profile(graph: str, positions: str, events: list[trace.Event]) -> GraphProfile | None:
    forward, backward = ([int(p) for p in half.split(",") if p] for half in positions.split("|")[:2])
    ours = [e for e in events if e[1] == graph]
    runs = _runs([e for e in ours if e[0] in ("begin", "store", "release")])
    forwards = _medians([r for r in runs if len(r) == len(forward)])
    backwards = _medians([r for r in _runs([e for e in ours if e[0] in ("load", "wait")]) if len(r) == len(backward)])
    if not forwards or not backwards:
        return None
    begin_first = {-1: forward[0], **dict(enumerate(forward[1:]))}
    return GraphProfile(graph, _anchors(forwards, begin_first), _anchors(backwards, dict(enumerate(backward))))


def _runs(events: list[trace.Event]) -> list[Run]:
    """The runs in the events of one direction. A new run begins where `seq` does not grow."""
    runs: list[Run] = []
    last_seq, last_end, compute_s = 0, 0.0, 0.0
    for _, _, _, seq, started, ended, *_ in events:
        if not runs or seq <= last_seq:
            runs.append({})
            last_end, compute_s = started, 0.0
        compute_s += started - last_end
        runs[-1][seq] = 1e3 * compute_s
        last_seq, last_end = seq, ended
    return runs


def _medians(runs: list[Run]) -> Run:
    """The median per node over the last complete runs, without the first, which is cold; empty without runs."""
    warm = (runs[1:] or runs)[-_RUNS:]
    if not warm:
        return {}
    return {seq: statistics.median(run[seq] for run in warm) for seq in sorted(warm[0])}


def _anchors(times: Run, positions: dict[int, int]) -> Anchors:
    """Pairs of position and ms, both ascending.

    Of nodes at one position the first counts, because nothing is computed between them.
    """
    anchors: list[tuple[int, float]] = []
    last_position, last_ms = -1, 0.0
    for seq, ms in sorted(times.items()):
        if positions[seq] > last_position:
            last_position, last_ms = positions[seq], round(max(ms, last_ms), 4)
            anchors.append((last_position, last_ms))
    return tuple(anchors)


def _scale(measured: Mapping[str, GraphProfile]) -> float:
    """Measured compute of all graphs, relative to the roofline's prediction; 1 if either is 0."""
    measured_ms = sum(half[-1][1] - half[0][1] for g in measured.values() for half in (g.forward, g.backward))
    roofline_ms = sum(float(trace.positions[name].split("|")[2]) for name in measured)
    return float(f"{measured_ms / roofline_ms:.3g}") if measured_ms and roofline_ms else 1.0


def _bandwidth(kind: str, events: list[trace.Event]) -> float:
    """Bytes per second, over the time in which transfers were under way; 0 if there were none."""
    done = sorted((e[4], e[5], e[6]) for e in events if e[0] == kind and e[7] == "ok")
    busy_s = 0.0
    until = 0.0
    for started, ended, _ in done:
        busy_s += max(ended - max(started, until), 0.0)
        until = max(until, ended)
    rate = sum(nbytes for _, _, nbytes in done) / busy_s if busy_s else 0.0
    return float(f"{rate:.2e}")
