"""Keep or offload, per alias group, under a budget of resident saved bytes."""

from __future__ import annotations

from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import AliasGroup, Decision, Keep, Offload, Plan


def select(partition: Partition, plan: Plan, *, budget: int | float, min_bytes: int) -> Plan:
    """Fill `plan.decisions`: offload, longest idle first, until at most `budget` bytes of saved tensors stay resident.

    `budget` is a number of bytes (int) or a share of the saved bytes (float from 0 to 1). Every byte that leaves
    costs the same I/O, so what it buys is the time that it is gone: groups with the longest idle time per byte moved
    go first, the larger one where two are equal. Groups under `min_bytes` and those with an obstacle always stay.
    """
    limit = int(budget * plan.saved_bytes) if isinstance(budget, float) else budget
    decisions: dict[int, Decision] = {g.slot: Keep(_reason(g, min_bytes) or "within the budget") for g in plan.groups}
    resident = plan.saved_bytes
    for group in sorted(plan.groups, key=lambda g: _rank(plan, g)):
        if resident <= limit:
            break
        if not _reason(group, min_bytes):
            decisions[group.slot] = Offload()
            resident -= group.nbytes
    return plan.with_(decisions=decisions)


def _reason(group: AliasGroup, min_bytes: int) -> str:
    return group.obstacle or ("below min_bytes" if group.nbytes < min_bytes else "")


def _rank(plan: Plan, group: AliasGroup) -> tuple[float, int, int]:
    idle = plan.lifetimes[group.slot].idle_ms if group.slot in plan.lifetimes else 0.0
    return (-idle, -group.nbytes, group.slot)
