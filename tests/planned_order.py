"""Whether our nodes have run in the order of their plans, by the trace."""

from __future__ import annotations

from collections.abc import Iterable

from ssd_fx.runtime import trace

BACKWARD = ("load", "wait")
FORWARD = ("begin", "store", "release")


def share(nodes: Iterable[tuple[str, str, int]]) -> float:
    """Of nodes by graph, kind and seq, the share that came with a greater seq than the node before in their run.

    A begin starts the run of a forward, and the lowest seq that of a backward.
    """
    last: dict[tuple[str, bool], int] = {}
    first: dict[str, int] = {}
    ordered = []
    for graph, kind, seq in nodes:
        if kind not in FORWARD + BACKWARD:
            continue
        of = graph, kind in BACKWARD
        if kind == "begin" or (kind in BACKWARD and seq <= first.get(graph, seq)):
            last[of] = -1
        if kind in BACKWARD:
            first[graph] = min(seq, first.get(graph, seq))
        if kind != "begin":
            ordered.append(seq > last.get(of, -1))
            last[of] = seq
    return sum(ordered) / len(ordered) if ordered else 1.0


def assert_in_planned_order() -> None:
    """Of all that the trace has."""
    assert share((event.graph, event.kind, event.seq) for event in trace.events()) == 1.0
