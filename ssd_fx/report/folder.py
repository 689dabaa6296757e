"""The directory of the option `dump`.

9bd39aac.plan.txt      the plan, for people          9bd39aac/00_joint.txt               the joint graph
9bd39aac.plan.json     the same in full              9bd39aac/02_partition_forward.txt   what the cut made of it
9bd39aac.forward.py    both rewritten graphs         ...                                 after each pass
9bd39aac.backward.py                                 9bd39aac/06_inductor_forward.txt    what Inductor generated
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from ssd_fx.passes.partitioner import GRAPH_NAME
from ssd_fx.report.code import configuration, marked, told_once
from ssd_fx.report.dump import Explanation


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
