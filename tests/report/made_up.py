"""Reports of plans that nobody made: each figure is what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MIB = 1 << 20


def group(slot: int, nbytes: int, decision: str = "offload", **changed: Any) -> dict[str, Any]:
    """An alias group, as `report.describe` tells of it."""
    return {
        "slot": slot,
        "name": f"n{slot}",
        "module": "",
        "source": "",
        "nbytes": nbytes,
        "stored_nbytes": nbytes,
        "decision": decision,
        "tier": "ssd" if decision == "offload" else "",
        "reason": "",
        "marked": False,
        "shared": "",
        "life": [],
        **changed,
    }


def graph(
    name: str, groups: Sequence[dict[str, Any]], budget: object = 0.5, host_speedup: float = 0.0, **predicted: float
) -> dict[str, Any]:
    """A graph of a second. Its peak, and its floor if none is given, are what its groups keep in memory."""
    saved, step_us = sum(each["nbytes"] for each in groups), 1_000_000
    offloaded = sum(each["nbytes"] for each in groups if each["decision"] == "offload")

    def memory(peak: int) -> dict[str, Any]:
        times = {"turn_us": step_us // 3, "step_us": step_us}
        return times | {"forward": [[0, peak]], "backward": [[step_us // 3, peak]]}

    kept = saved - offloaded
    figures = {"step_s": 1.0, "compute_s": 1.0, "transfer_s": 0.0, "write_stall_s": 0.0, "read_stall_s": 0.0}
    figures |= {"peak_bytes": kept, "floor_bytes": kept, "limit_bytes": kept}
    figures |= {"kept_peak_bytes": saved, "written_bytes": offloaded}
    return {
        "graph": name,
        "budget": budget,
        "min_bytes": MIB,
        "inflight": 128 * MIB,
        "prefetch": 64 * MIB,
        "rates": "typical",
        "saved_bytes": saved,
        "offloaded_bytes": offloaded,
        "predicted": figures | predicted,
        "host_speedup": host_speedup,
        "stock": {"saved_bytes": saved, "floor_bytes": kept, "peak_bytes": saved, **memory(saved)},
        **memory(kept),
        "groups": list(groups),
        "recomputed": [],
    }
