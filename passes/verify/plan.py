"""The rules of a plan, checked after every analysis and every decision.

produced <= store, last forward read <= release        wait <= first backward read
predicted peak, kept bytes, host memory within their limits
"""

from __future__ import annotations

from ssd_fx.passes.alias.packing import is_dense, span
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Offload, Plan, replay_of
from ssd_fx.passes.verify.errors import require


def verify_plan(partition: Partition, plan: Plan) -> None:
    """Check the parts of the plan that exist already.

    Raises:
        VerifyError: a rule is broken.
    """
    forward = {n.name: i for i, n in enumerate(partition.forward.graph.nodes)}
    members = [m.name for g in plan.groups for m in g.members]
    require(len(members) == len(set(members)), "a saved tensor is in two alias groups", "alias")
    unsaved = sorted(set(members) - {n.name for n in partition.saved})
    require(not unsaved, f"members {unsaved} are not saved", "alias")
    slots = {g.slot for g in plan.groups}
    require(len(slots) == len(plan.groups), "two alias groups have one slot", "alias")
    require(set(plan.decisions) <= slots, "a decision is about no alias group", "select")
    require(not plan.decisions or set(plan.decisions) == slots, "an alias group has no decision", "select")
    offloaded = {g.slot for g in plan.offloaded}
    require(set(plan.schedule) == offloaded, "schedule and offloaded groups differ", "select")
    for group in plan.groups:
        require(group.base in forward, f"base {group.base!r} of slot {group.slot} is not in the forward", "alias")
        if isinstance(plan.decisions.get(group.slot), Offload):
            require(not group.obstacle, f"{group.base!r} is offloaded but {group.obstacle}", "select")
            _verify_members(group)
            _verify_trip(plan, group)
    if plan.replay is not None:
        _verify_limits(partition, plan)
        _verify_host(plan)


def _verify_limits(partition: Partition, plan: Plan) -> None:
    """The predicted peak, and the bytes that are kept although they could be offloaded, are within the limits."""
    found, limits = replay_of(plan), plan.limits
    at = [*partition.forward.graph.nodes, *partition.backward.graph.nodes][found.peak_node]
    text = f"{found.peak} B are predicted at {at.name!r}, and the budget allows {limits.memory:.0f} B"
    require(found.peak <= limits.memory, text, "select", at)
    text = f"{found.kept_bytes} B are kept, and the budget allows {limits.kept:.0f} B"
    require(found.kept_bytes <= limits.kept, text, "select")
    text = f"{found.stays} B are in memory when the backward begins, and the budget allows {limits.stays:.0f} B"
    require(found.stays <= limits.stays, text, "select")


def _verify_host(plan: Plan) -> None:
    """The predicted peak in host memory fits there, and equals the bytes that the plan puts there."""
    found = replay_of(plan)
    peak, budget = found.host_peak, found.step.host_budget
    require(peak <= budget, f"the plan has {peak} B in host memory, where {budget} B may be", "select")
    hosted = sum(g.stored_nbytes for g in plan.offloaded if plan.tier(g.slot) == "host")
    text = f"{hosted} B are to go to host memory, and {peak} B are predicted there"
    require(hosted == peak, text, "select")


def _verify_members(group: AliasGroup) -> None:
    """The stored tensor is dense, and every member lies within it."""
    dense = group.layout is not None and is_dense(group.layout)
    require(dense, f"what is stored of {group.base!r} has gaps", "alias")
    stored = group.stored
    if stored.is_symbolic:
        return  # then all of a storage is stored, and views cannot lie outside of it
    for member in group.members:
        layout = member.copy.chain[0].source if member.copy else member.layout
        inside = span(layout) * layout.dtype.itemsize <= stored.nbytes
        require(inside, f"member {member.name!r} lies outside of what is stored of {group.base!r}", "alias")


def _verify_trip(plan: Plan, group: AliasGroup) -> None:
    """The nodes of a group stand as in the module's picture. Their own order is checked by `Schedule`."""
    name, item, trip = group.base, plan.items[group.slot], plan.schedule[group.slot]
    rules = (
        (trip.store.at >= item.produced, f"store of {name!r} comes before the tensor is produced"),
        (trip.release.at >= item.last_use, f"{name!r} is read in the forward after its release"),
        (trip.wait.at <= item.first_use, f"{name!r} is used in the backward before its wait"),
        (not (trip.is_later and trip.blocks), f"release of {name!r} waits for a write that begins later"),
    )
    for holds, text in rules:
        require(holds, text, "select")
