"""Where the plan of a graph goes: to the log, to PyTorch's structured trace (`tlparse`), to the directory of `dump`.

9bd39aac.plan.txt      the plan, for people          9bd39aac/00_joint.txt               the joint graph
9bd39aac.plan.json     the same in full              9bd39aac/02_partition_forward.txt   what the cut made of it
9bd39aac.forward.py    both rewritten graphs         ...                                 after each pass
9bd39aac.backward.py                                 9bd39aac/06_inductor_forward.txt    what Inductor generated
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx

from ssd_fx.compat import trace_structured
from ssd_fx.passes.partitioner import GRAPH_NAME, Rewritten, is_traced
from ssd_fx.report.describe import source_lines
from ssd_fx.report.dump import Explanation, configuration, dump, head, marked, table, told_once

log = logging.getLogger("ssd_fx")


def write(directory: str, share: str, made: Explanation) -> None:
    """Write what there is to see of a graph. `share`, if any, begins the plan: this rank's share of the node."""
    numbered = Path(directory) / made.graph
    numbered.mkdir(parents=True, exist_ok=True)
    for old in numbered.glob("[0-9][0-9]_*.txt"):
        old.unlink()
    for name, text in made.files().items():
        head = f"{share}\n" if share and name.endswith(".plan.txt") else ""
        (Path(directory) / name).write_text(head + text, encoding="utf-8")


def with_code(
    directory: str, compiler: Callable[..., Any], gm: fx.GraphModule, inputs: Sequence[object], **settings: Any
) -> Any:
    """What Inductor's `compiler` returns for a graph. Its code goes to the numbered files, with our calls marked."""
    config = configuration(gm.graph)  # before the compiler changes it
    made = compiler(gm, inputs, **settings)
    code, graph = getattr(made, "source_code", ""), gm.meta.get(GRAPH_NAME)
    if code and graph:
        numbered = Path(directory) / graph
        numbered.mkdir(parents=True, exist_ok=True)  # somebody may have removed it before the first backward
        part = "backward" if settings.get("is_backward") else "forward"
        number = len(list(numbered.glob("[0-9][0-9]_*.txt")))
        told = told_once(marked(code), config)
        (numbered / f"{number:02}_inductor_{part}.txt").write_text(told, encoding="utf-8")
    return made


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
