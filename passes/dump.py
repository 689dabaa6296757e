"""The plan as text: one table that serves users, bug reports and golden tests.

Fixed columns, in the order of definition, exact bytes. `>` means after, `<` before:

    relu    256 B  offload  store>relu release>mul load<mm_3 wait<mul_1  [relu, detach, view]
    sin     256 B  keep     below min_bytes                              [sin]
"""

from __future__ import annotations

import json
from pathlib import Path

from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import AliasGroup, Keep, Offload, Plan, Prediction


def table(plan: Plan, forward: list[str], backward: list[str]) -> str:
    """One line per alias group. `forward` and `backward` are the names of the nodes before insertion."""
    rows = [_row(plan, g, forward, backward) for g in plan.groups]
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
    lines = [
        f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:<{widths[2]}}  {r[3]:<{widths[3]}}  {r[4]}".rstrip()
        for r in rows
    ]
    share = 100 * plan.offloaded_bytes / plan.saved_bytes if plan.saved_bytes else 0.0
    head = (
        f"graph {plan.graph}: {len(plan.groups)} alias groups, {plan.saved_bytes} B saved, "
        f"{len(plan.offloaded)} groups and {plan.offloaded_bytes} B offloaded ({share:.1f}%)"
    )
    return "\n".join([head, *lines, *_predicted(plan)]) + "\n"


def predicted(plan: Plan) -> dict[str, float]:
    """What the simulator says of the plan; seconds, and bytes above the level before the step."""
    if plan.prediction is None:
        return {}
    found, outcome = plan.prediction, plan.prediction.solution.outcome
    return {
        "step_s": outcome.seconds,
        "compute_s": sum(found.modelled.step.seconds),
        "write_stall_s": outcome.write_stall_s,
        "read_stall_s": outcome.read_stall_s,
        "peak_bytes": outcome.peak,
        "limit_bytes": int(found.limits.memory),
        "floor_bytes": found.floor,
        "kept_peak_bytes": found.everything,
        **_host(found),
    }


def _host(found: Prediction) -> dict[str, float]:
    budget = found.modelled.step.host_budget
    if budget:
        return {"host_peak_bytes": found.solution.outcome.host_peak, "host_budget_bytes": budget}
    return {"resting_bytes": found.resting} if found.resting else {}


def _predicted(plan: Plan) -> list[str]:
    figures = predicted(plan)
    if not figures:
        return []
    step, compute = figures["step_s"] * 1e3, figures["compute_s"] * 1e3
    writes, reads = figures["write_stall_s"] * 1e3, figures["read_stall_s"] * 1e3
    return [
        f"predicted step {step:.3g} ms: compute {compute:.3g}, waiting for writes {writes:.3g}, for reads {reads:.3g}",
        f"predicted peak {figures['peak_bytes']} B of {figures['limit_bytes']} B allowed; "
        f"floor (infinitely fast I/O) {figures['floor_bytes']} B, everything kept {figures['kept_peak_bytes']} B",
        *_predicted_host(figures),
    ]


def _predicted_host(figures: dict[str, float]) -> list[str]:
    if "host_budget_bytes" in figures:
        return [f"predicted host memory {figures['host_peak_bytes']} B of {figures['host_budget_bytes']} B allowed"]
    if "resting_bytes" in figures:
        return [f"host memory is this device's: beyond that peak the runtime lets {figures['resting_bytes']} B rest"]
    return []


def _row(plan: Plan, group: AliasGroup, forward: list[str], backward: list[str]) -> tuple[str, str, str, str, str]:
    decision = plan.decisions.get(group.slot)
    members = f"[{', '.join(m.name for m in group.members)}]"
    part = f"{group.stored_nbytes} of " if group.stored_nbytes != group.nbytes else ""
    size = f"{part}{group.nbytes} B"
    if decision is None:
        return group.base, size, "undecided", "", members
    if isinstance(decision, Keep):
        return group.base, size, "keep", decision.reason, members
    points = plan.points.get(group.slot)
    gone = f"offload {decision.tier}".rstrip() if isinstance(decision, Offload) else "offload"
    if points is None:
        return group.base, size, gone, "", members
    where = (
        f"store>{forward[points.store_after]} release>{forward[points.release_after]} "
        f"load<{backward[points.load_before]} wait<{backward[points.wait_before]}"
    )
    mark = plan.marks.get(group.slot)
    return group.base, size, gone, where if mark is None else f"{where} ({mark.reason})", members


def write(directory: Path, partition: Partition, plan: Plan, text: str) -> None:
    """Write `<graph>.plan.txt`, `.plan.json`, `.forward.py` and `.backward.py` into `directory`, made if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{plan.graph}.plan.txt").write_text(text)
    summary = {"graph": plan.graph, "saved_bytes": plan.saved_bytes, "offloaded_bytes": plan.offloaded_bytes}
    tiers = {g.base: d.tier for g in plan.offloaded if isinstance(d := plan.decisions[g.slot], Offload) and d.tier}
    figures = json.dumps(summary | {"predicted": predicted(plan)} | ({"tiers": tiers} if tiers else {}), indent=1)
    (directory / f"{plan.graph}.plan.json").write_text(figures + "\n")
    for name, module in (("forward", partition.forward), ("backward", partition.backward)):
        (directory / f"{plan.graph}.{name}.py").write_text(module.print_readable(print_output=False))
