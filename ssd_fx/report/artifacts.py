"""What PyTorch's own tools show of a compiled graph: its structured trace (`tlparse`) and `TORCH_LOGS=ssd_fx`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial

from torch._logging import trace_structured

from ssd_fx.passes.partitioner import Rewritten, is_traced
from ssd_fx.report.dump import dump, head, source_lines, table

log = logging.getLogger("ssd_fx")


def tell(arguments: Sequence[str], rewritten: Rewritten) -> None:
    """Log the plan of a graph, a line at level INFO and all of it at DEBUG, and put it into PyTorch's trace, if any."""
    partition, plan, names = rewritten.partition, rewritten.plan, rewritten.names
    log.info("%s", head(plan))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", table(plan, names, source_lines(partition, arguments)))
    if not is_traced():
        return
    made = dump(partition, plan, names, arguments, rewritten.stages.found)
    summary = {name: value for name, value in made.plan.items() if name not in ("groups", "recomputed")}
    _artifact("ssd_fx_summary", "json", lambda: json.dumps(summary, indent=1))
    _artifact("ssd_fx_plan", "string", lambda: made.table)
    _artifact("ssd_fx_plan_json", "json", lambda: json.dumps(made.plan, indent=1))
    for i, (name, code) in enumerate(made.stages.items()):
        _artifact(f"ssd_fx_{i:02}_{name}", "string", partial(str, code))


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
