"""Which operators of a step need a row for their memory in the mixed-integer program."""

from __future__ import annotations

import numpy as np

from ssd_fx.passes.axis import Step


def memory_rows(step: Step, limit: float, most: int | None) -> list[int]:
    """The operators whose memory must be looked at: where not everything fits, and no earlier row says as much.

    In the forward bytes come only where an item is produced: until then a row with no higher base than an earlier one
    follows from it. Between two rows it does not matter where a release or a load stands, so that the latest release
    and the earliest load stand for all.
    """
    everything = kept_memory(step)
    produced = {item.produced for item in step.items}
    rows: list[int] = []
    record = -1
    for p, total in enumerate(everything):
        if p in produced:
            record = -1
        if total > limit and (p >= step.forward or step.base[p] > record):
            rows.append(p)
            record = step.base[p]
    return rows if most is None or len(rows) <= most else _highest(step, rows, most)


def kept_memory(step: Step) -> list[int]:
    """Bytes during every operator with everything kept."""
    memory = np.array(step.base, dtype=np.int64)
    for item in step.items:
        memory[item.produced : item.last_bwd_use + 1] += item.nbytes
    return [int(b) for b in memory]


def _highest(step: Step, rows: list[int], most: int) -> list[int]:
    """The row of the highest base of every run without an event; of those the `most` with the highest memory."""
    events = {0, step.forward}
    for item in step.items:
        events |= {item.produced, item.last_use + 1, item.first_use, item.last_bwd_use + 1}
    runs: dict[int, int] = {}
    run = 0
    for p in range(len(step.seconds)):
        run = p if p in events else run
        if p in rows and (run not in runs or step.base[p] > step.base[runs[run]]):
            runs[run] = p
    everything = kept_memory(step)
    return sorted(sorted(runs.values(), key=lambda p: -everything[p])[:most])
