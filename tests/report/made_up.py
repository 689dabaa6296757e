"""Reports of plans that nobody made: each figure is what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ssd_fx.report.model import GraphReport, GroupRow
from ssd_fx.report.timeline import Timeline

MIB = 1 << 20


def group(slot: int, nbytes: int, decision: str = "offload", **changed: Any) -> GroupRow:
    """An alias group, as `report.describe` tells of it."""
    given: dict[str, Any] = {
        "graph": "a",
        "slot": slot,
        "name": f"n{slot}",
        "module": "",
        "source": "",
        "nbytes": nbytes,
        "stored_nbytes": nbytes,
        "decision": decision,
        "tier": "ssd" if decision == "offload" else "",
    }
    return GroupRow(**given | changed)


def graph(
    name: str, groups: Sequence[GroupRow], budget: Any = 0.5, host_speedup: float = 0.0, **predicted: float
) -> GraphReport:
    """A graph of a second. Its peak, and its floor if none is given, are what its groups keep in memory."""
    saved = sum(each.nbytes for each in groups)
    offloaded = sum(each.nbytes for each in groups if each.decision == "offload")
    kept = saved - offloaded

    def level(nbytes: int) -> Timeline:
        return Timeline((name,), (), ((0.0, nbytes), (1 / 3, nbytes)), turn_s=1 / 3, end_s=1.0, stays=nbytes)

    figures = {"step_s": 1.0, "compute_s": 1.0, "transfer_s": 0.0, "write_stall_s": 0.0, "read_stall_s": 0.0}
    figures |= {"peak_bytes": kept, "floor_bytes": kept, "limit_bytes": kept}
    figures |= {"kept_peak_bytes": saved, "written_bytes": offloaded}
    return GraphReport(
        graph=name,
        budget=budget,
        min_bytes=MIB,
        inflight=128 * MIB,
        prefetch=64 * MIB,
        rates="typical",
        saved_bytes=saved,
        offloaded_bytes=offloaded,
        predicted=figures | predicted,
        host_speedup=host_speedup,
        whole=True,
        stock=level(saved),
        own=level(kept),
        rows=tuple(replace(each, graph=name) for each in groups),
    )
