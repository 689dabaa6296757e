"""Warnings about tensors that a plan does not keep or store as the user asked, or keeps for a reason that can go."""

from __future__ import annotations

import warnings

from ssd_fx.passes.alias.storages import DYNAMIC, JAGGED, NESTED
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan

_CHANGEABLE = {
    DYNAMIC: "shapes are dynamic, and the backward does not know all sizes that a load would need. ssd_fx can offload "
    "it with equal shapes (drop_last=True, padding) or torch.compile(dynamic=False), which compiles for every shape.",
    JAGGED: "the caller passes a jagged nested tensor, and the backward does not know how long it is. ssd_fx can "
    "offload it if the compiled code gets the values and the offsets, and builds the tensor itself "
    "(torch.nested.nested_tensor_from_jagged).",
    NESTED: "a nested region (torch.compiler.nested_compile_region) returns it, and PyTorch's metadata confuse the "
    "results of its calls. ssd_fx can offload it without the region.",
}
"""Obstacles that the user can remove, and what the warning says about each."""


def warn(partition: Partition, plan: Plan, options: PlanOptions) -> None:
    """Warn of all that the user should know about the plan."""
    _warn_marked(plan)
    _warn_kept(plan, options.min_bytes)
    if partition.has_host_tier:
        _warn_full_host(plan)


def _warn_marked(plan: Plan) -> None:
    """Warn of groups that were marked to be offloaded and cannot be."""
    stuck = [g for g in plan.groups if g.obstacle and g.slot in plan.marks and plan.marks[g.slot].decision == "offload"]
    if stuck:
        listed = ", ".join(f"{g.base!r} ({g.nbytes} B, {plan.marks[g.slot].reason}: {g.obstacle})" for g in stuck)
        warnings.warn(
            f"ssd_fx cannot offload all that is marked so in graph {plan.graph}: {listed}", RuntimeWarning, stacklevel=2
        )


def _warn_kept(plan: Plan, min_bytes: int) -> None:
    """Warn of groups that are kept for an obstacle which the user can remove."""
    for obstacle, text in _CHANGEABLE.items():
        nbytes = sum(g.nbytes for g in plan.groups if g.obstacle == obstacle and g.nbytes >= min_bytes)
        if nbytes:
            message = f"ssd_fx keeps about {nbytes} B of graph {plan.graph} in memory: {text}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _warn_full_host(plan: Plan) -> None:
    """Warn of groups that were marked for host memory, which is full, and go to the drive."""
    marked = {slot for slot, mark in plan.marks.items() if (mark.decision, mark.tier) == ("offload", "host")}
    full = [g for g in plan.offloaded if g.slot in marked and plan.tier(g.slot) != "host"]
    if full:
        listed = ", ".join(f"{g.base!r} ({g.stored_nbytes} B, {plan.marks[g.slot].reason})" for g in full)
        warnings.warn(
            f"ssd_fx has no room in host memory for all that is marked for it in graph {plan.graph}; to the drive go: "
            f"{listed}; host_budget would have to be larger",
            RuntimeWarning,
            stacklevel=2,
        )
