"""From operators of the simulated step to nodes of the graphs, for every store, release, load and wait.

    forward    base [store]  ...last use... [release]
    backward   [load] ... [wait] first use

It decides nothing: `place.py` has chosen the operators.
"""

from __future__ import annotations

from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan, Points, Prediction


def schedule(partition: Partition, plan: Plan) -> Plan:
    """Fill `plan.points` for every offloaded group. Needs `plan.prediction`."""
    assert plan.prediction is not None, "schedule needs the transfers, which pass 'select' provides"
    item = {slot: i for i, slot in enumerate(plan.prediction.modelled.slots)}
    return plan.with_(points={g.slot: _points(plan, plan.prediction, g.slot, item[g.slot]) for g in plan.offloaded})


def _points(plan: Plan, prediction: Prediction, slot: int, item: int) -> Points:
    begins, ends = prediction.modelled.begins, prediction.modelled.ends
    transfer, life = prediction.solution.transfers[item], plan.lifetimes[slot]
    assert plan.timeline is not None
    return Points(
        store_after=min(ends[transfer.store_after], len(plan.timeline.forward) - 3),
        release_after=min(ends[transfer.release_after], len(plan.timeline.forward) - 3),  # before the output
        load_before=begins[transfer.load_before],
        wait_before=life.first_bwd_use,
        block=transfer.block,
        strict=transfer.strict,
    )
