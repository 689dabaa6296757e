"""Measured times of a graph's own runs, which replace the roofline's where they are known.

roofline   |--a--|----b----|--c--|        starts of the nodes
anchors          5         9              ms of compute until a node, as measured
rescaled   |-----a-----|--b--|---c---|    proportions between two anchors stay the roofline's
other graph    in the mean scale of those that were measured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ssd_fx.passes.cost.machine import Machine

Anchors = tuple[tuple[int, float], ...]  # (position of a node in its graph, ms of compute before it), ascending


@dataclass(frozen=True)
class GraphProfile:
    """One graph, by its fingerprint. Times count from the first anchor, which is at 0."""

    graph: str
    forward: Anchors
    backward: Anchors


@dataclass(frozen=True)
class Profile:
    """What a run measured: plain values, because the repr is part of compile caches.

    `write_bw`, `read_bw`: bytes per second while a transfer was under way; 0 where there was none. `scale`: how much
    longer than the roofline the compute of the graphs took. It holds for graphs that did not run too: another choice of
    what to recompute is another graph, and must not look faster only because nobody has measured it.
    """

    graphs: tuple[GraphProfile, ...] = ()
    write_bw: float = 0.0
    read_bw: float = 0.0
    scale: float = 1.0

    def of(self, graph: str) -> GraphProfile | None:
        return next((g for g in self.graphs if g.graph == graph), None)

    def machine(self, machine: Machine, graph: str) -> Machine:
        """`machine` with the measured bandwidths; times measured beside transfers have their drag in them."""
        rates = {"write_bw": self.write_bw, "read_bw": self.read_bw}
        measured = machine.with_rates({name: rate for name, rate in rates.items() if rate})
        return replace(measured, drag_s_per_byte=0.0) if self.of(graph) or self.scale != 1.0 else measured

    def rescale(
        self, graph: str, forward: tuple[float, ...], backward: tuple[float, ...]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The starts of the nodes, in ms, moved so that the anchors of `graph` are met; as they are if it has none.

        Raises:
            ValueError: an anchor at a position that the graph does not have.
        """
        found = self.of(graph)
        if found is None:
            return forward, backward
        return _rescaled(graph, forward, found.forward), _rescaled(graph, backward, found.backward)


def _rescaled(graph: str, starts: tuple[float, ...], anchors: Anchors) -> tuple[float, ...]:
    """Piecewise linear through the anchors; in front of the first and behind the last one at the mean scale."""
    outside = [position for position, _ in anchors if not 0 <= position < len(starts)]
    if outside:
        raise ValueError(
            f"the profile of graph {graph} has an anchor at node {outside[0]}, but the graph has {len(starts) - 1}"
        )
    known = [(starts[position], ms) for position, ms in anchors]
    known = [pair for i, pair in enumerate(known) if i == 0 or pair[0] > known[i - 1][0]]
    if len(known) < 2 or known[-1][1] <= known[0][1]:
        return starts
    scale = (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])
    at, offset = 0, known[0][0] * scale - known[0][1]  # what comes before the first anchor takes its scaled time
    moved = []
    for start in starts:
        while at + 1 < len(known) and known[at + 1][0] <= start:
            at += 1
        moved.append(offset + _through(known, at, start, scale))
    return tuple(moved)


def _through(known: Sequence[tuple[float, float]], at: int, start: float, scale: float) -> float:
    (begin, ms), inside = known[at], start >= known[0][0] and at + 1 < len(known)
    if not inside:
        return ms + (start - begin) * scale
    end, end_ms = known[at + 1]
    return ms + (start - begin) * (end_ms - ms) / (end - begin)
