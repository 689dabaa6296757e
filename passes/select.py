"""Keep or offload, per alias group, under a budget of resident saved bytes."""

from __future__ import annotations

from ssd_fx.passes.marks import forced, prefers_offload
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import AliasGroup, Decision, Keep, Offload, Plan


def select(partition: Partition, plan: Plan, *, budget: int | float, min_bytes: int) -> Plan:
    """Fill `plan.decisions`: offload, longest idle first, until at most `budget` bytes of saved tensors stay resident.

    `budget` is a number of bytes (int) or a share of the saved bytes (float from 0 to 1). Every byte that leaves
    costs the same I/O, so what it buys is the time that it is gone: groups with the longest idle time per byte moved
    go first, the larger one where two are equal. Groups under `min_bytes` and those with an obstacle always stay. Marks
    are obeyed before the budget; those that prefer to go are the first that it sends.
    """
    limit = int(budget * plan.saved_bytes) if isinstance(budget, float) else budget
    bound = {g.slot: decision for g in plan.groups if (decision := forced(plan, g, min_bytes)) is not None}
    decisions: dict[int, Decision] = {g.slot: Keep(_reason(g, min_bytes) or "within the budget") for g in plan.groups}
    decisions |= bound
    resident = sum(g.nbytes for g in plan.groups if isinstance(decisions[g.slot], Keep))
    for group in sorted((g for g in plan.groups if g.slot not in bound), key=lambda g: _rank(plan, g)):
        if resident <= limit:
            break
        if not _reason(group, min_bytes):
            decisions[group.slot] = Offload()
            resident -= group.nbytes
    return plan.with_(decisions=decisions)


def _reason(group: AliasGroup, min_bytes: int) -> str:
    return group.obstacle or ("below min_bytes" if group.nbytes < min_bytes else "")


def _rank(plan: Plan, group: AliasGroup) -> tuple[bool, float, int, int]:
    idle = plan.lifetimes[group.slot].idle_ms if group.slot in plan.lifetimes else 0.0
    return (not prefers_offload(plan, group), -idle, -group.nbytes, group.slot)
