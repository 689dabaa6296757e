"""What a user is told about a plan: what stays or goes elsewhere than was asked for. A fallback is loud."""

from __future__ import annotations

import logging
import warnings

from ssd_fx.passes.alias.storages import DYNAMIC, NESTED
from ssd_fx.passes.cost.profile import Profile
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Plan

log = logging.getLogger("ssd_fx")

_CHANGEABLE = {
    DYNAMIC: "shapes are dynamic, and what is stored cannot be told from the sizes that the backward knows. Equal "
    "shapes (drop_last=True, padding) or torch.compile(dynamic=False), which compiles for every shape, let them leave.",
    NESTED: "a nested region (torch.compiler.nested_compile_region) returns it, and PyTorch does not tell apart what "
    "its calls return. Without the region it leaves.",
}
"""Obstacles that the user can remove."""


def tell(plan: Plan, options: PlanOptions) -> None:
    """Warn of what keeps memory that was to be free."""
    _tell_kept(plan, options.min_bytes)
    _tell_full_host(plan)
    _tell_unprofiled(plan, options.profile)


def _tell_kept(plan: Plan, min_bytes: int) -> None:
    for obstacle, text in _CHANGEABLE.items():
        nbytes = sum(g.nbytes for g in plan.groups if g.obstacle == obstacle and g.nbytes >= min_bytes)
        if nbytes:
            told = f"ssd_fx keeps about {nbytes} B of graph {plan.graph} in memory: {text}"
            warnings.warn(told, RuntimeWarning, stacklevel=2)


def _tell_full_host(plan: Plan) -> None:
    """What was to go to host memory goes to the drive where that is full."""
    marked = {slot for slot, mark in plan.marks.items() if (mark.decision, mark.tier) == ("offload", "host")}
    full = [g for g in plan.offloaded if g.slot in marked and plan.tier(g.slot) == "ssd"]
    if full:
        listed = ", ".join(f"{g.base!r} ({g.stored_nbytes} B, {plan.marks[g.slot].reason})" for g in full)
        warnings.warn(
            f"ssd_fx has no room in host memory for what graph {plan.graph} was told to put there, which goes to the "
            f"drive: {listed}; host_budget would have to be larger",
            RuntimeWarning,
            stacklevel=2,
        )


def _tell_unprofiled(plan: Plan, profile: Profile | None) -> None:
    if profile is not None and profile.of(plan.graph) is None:
        log.info(
            "graph %s is not in the profile, whose graphs are %s: another model, or the same one cut otherwise, as "
            "after a change of the options. Its times are predicted, times %.3g, as the measured ones were longer",
            plan.graph,
            ", ".join(g.graph for g in profile.graphs),
            profile.scale,
        )
