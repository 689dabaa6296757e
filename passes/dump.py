"""The plan as text: one table that serves users, bug reports and golden tests.

Fixed columns, in the order of definition, exact bytes; the modules where they are known. `>` means after, `<` before:

    relu    256 B  offload    store>relu release>mul load<mm_3 wait<mul_1  [relu, detach, view]
    sin     256 B  keep       below min_bytes                              [sin]
    gelu    256 B  recompute  0.0132 ms

Layers that are alike are told once (`layers.py`); `plan.json` has them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.layers import Row, fold
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Keep, Plan, Prediction, Recompute

Names = tuple[list[str], list[str]]  # of the nodes of the forward, and of the backward


def node_names(partition: Partition) -> Names:
    """The names of the nodes of both graphs: before insertion, those that a plan's points mean."""
    return [n.name for n in partition.forward.graph.nodes], [n.name for n in partition.backward.graph.nodes]


def table(plan: Plan, names: Names) -> str:
    """A head, one line per alias group and per tensor that is computed again, and what is predicted.

    `names`: `node_names`, taken before insertion.
    """
    rows = [*fold(_row(plan, g, names) for g in plan.groups), *fold(_recomputed(plan))]
    share = 100 * plan.offloaded_bytes / plan.saved_bytes if plan.saved_bytes else 0.0
    head = (
        f"graph {plan.graph}: {len(plan.groups)} alias groups, {plan.saved_bytes} B saved, "
        f"{len(plan.offloaded)} groups and {plan.offloaded_bytes} B offloaded ({share:.1f}%)"
    )
    if plan.recomputed:
        head += f", {len(plan.recomputed)} tensors and {sum(r.nbytes for r in plan.recomputed)} B computed again"
    return "\n".join([head, *_aligned([row.cells for row in rows]), *_predicted(plan)]) + "\n"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns side by side, sizes to the right; one that is empty in all rows is left out."""
    padded = []
    for i, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        if width:
            padded.append([cell.rjust(width) if i == Row.SIZE else cell.ljust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


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


def _row(plan: Plan, group: AliasGroup, names: Names) -> Row:
    decision, mark = plan.decisions.get(group.slot), plan.marks.get(group.slot)
    part = f"{group.stored_nbytes} of " if group.stored_nbytes != group.nbytes else ""
    where = ""
    if decision is None:
        what, reason = "undecided", ""
    elif isinstance(decision, Keep):
        what, reason = "keep", decision.reason
    elif isinstance(decision, Recompute):
        what, reason = "recompute", _price(plan.prices[group.slot].seconds)
    else:
        what, reason = f"offload {decision.tier}".rstrip(), "" if mark is None else mark.reason
        where = " ".join(f"{name}{at}" for name, at in _points(plan, group, names).items())
    members = tuple(m.name for m in group.members)
    return Row(group.base, plan.modules.get(group.slot, ""), f"{part}{group.nbytes} B", what, reason, where, members)


def _points(plan: Plan, group: AliasGroup, names: Names) -> dict[str, str]:
    """The names of the nodes that a group's nodes stand behind (`>`) or before (`<`); empty before it is scheduled."""
    points, (forward, backward) = plan.points.get(group.slot), names
    if points is None:
        return {}
    return {
        "store>": forward[points.store_after],
        "release>": forward[points.release_after],
        "load<": backward[points.load_before],
        "wait<": backward[points.wait_before],
    }


def _recomputed(plan: Plan) -> Iterable[Row]:
    return (Row(r.base, r.module, f"{r.nbytes} B", "recompute", _price(r.seconds)) for r in plan.recomputed)


def _price(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


LEGEND = """
# One row per alias group, a storage that is saved: its base, its module, its bytes, what becomes of it, where or why,
# [the saved tensors that are views of it]. "{0..3} x 4": rows of four layers that are alike.
# store>, release>: the forward node behind which the write starts, and the memory is given up; load<, wait<: the
# backward node before which the read starts, and ends at the latest.
# floor: the peak if everything that can leave left at once. allowed: the floor, and for a share its part of what is
# between floor and everything kept, for a number of bytes so many more. Predictions use the options machine, profile.
"""


def files(partition: Partition, plan: Plan, names: Names) -> dict[str, str]:
    """The dump of a graph behind insertion: `<graph>.plan.txt`, `.plan.json`, `.forward.py` and `.backward.py`."""
    return {
        f"{plan.graph}.plan.txt": table(plan, names) + LEGEND,
        f"{plan.graph}.plan.json": json.dumps(_details(plan, names), indent=1) + "\n",
        f"{plan.graph}.forward.py": partition.forward.print_readable(print_output=False),
        f"{plan.graph}.backward.py": partition.backward.print_readable(print_output=False),
    }


def _details(plan: Plan, names: Names) -> dict[str, object]:
    """All that the table says, of every layer."""
    groups = []
    for group in plan.groups:
        row = _row(plan, group, names)
        found = {"name": row.name, "module": row.module, "nbytes": group.nbytes, "stored_nbytes": group.stored_nbytes}
        found |= {"decision": row.decision, "reason": row.reason, "members": list(row.members)}
        groups.append(found | {name.rstrip("<>"): at for name, at in _points(plan, group, names).items()})
    again = [{"name": r.base, "module": r.module, "nbytes": r.nbytes, "seconds": r.seconds} for r in plan.recomputed]
    totals = {"graph": plan.graph, "saved_bytes": plan.saved_bytes, "offloaded_bytes": plan.offloaded_bytes}
    return totals | {"predicted": predicted(plan), "groups": groups, "recomputed": again}
