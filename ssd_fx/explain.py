"""What becomes of a model's graphs, as values: to look at, and for tests of toy graphs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config as dynamo_config

from ssd_fx.backend import backend, check_options

_END = ".plan.txt"
_OFTEN = 1 << 20  # compilations of one function that Dynamo takes before it runs it uncompiled: a test has many


@dataclass(frozen=True)
class Explanation:
    """One compiled graph, as the option `dump` writes it.

    `graph`: its name in stats, logs and traces. `table`: the plan, for people. `plan`: the same in full, with the keys
    `saved_bytes`, `offloaded_bytes`, `predicted`, `groups` and `recomputed`. `forward`, `backward`: the code of both
    graphs with the stores, releases, loads and waits in them.
    """

    graph: str
    table: str
    plan: Mapping[str, Any]
    forward: str
    backward: str

    def __str__(self) -> str:
        return self.table


def explain(
    model: Callable[..., Any], *, options: Mapping[str, Any] | None = None, **how: Any
) -> Callable[..., list[Explanation]]:
    """A function that takes the inputs of `model` and returns what `ssd_fx.backend` makes of each of its graphs, in the
    order in which they run.

        for graph in ssd_fx.explain(model, options={"budget": 0.5})(tokens, targets):
            print(graph)

    It compiles and runs the forward once, which draws random numbers and changes buffers as a forward does. `options`
    are those of the backend, `how` what else `torch.compile` takes (`dynamic`, `fullgraph`). For a test of a toy:
    `{"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0}` plans the same everywhere, in a
    second and without a drive.

    Raises:
        ValueError, OSError: what `check_options` raises, at once; and what a budget or a pattern of module names raises
            that does not suit the graph, when it is called.
        ValueError: when called, nothing was compiled for a backward.
    """
    check_options(options)

    def explained(*args: Any, **kwargs: Any) -> list[Explanation]:
        with tempfile.TemporaryDirectory(prefix="ssd_fx-explain-") as directory:
            said = {**(options or {}), "dump": directory}
            compiled = torch.compile(model, backend=backend, options=said, **how)
            with dynamo_config.patch(recompile_limit=_OFTEN, accumulated_recompile_limit=_OFTEN):
                compiled(*args, **kwargs)
            plans = sorted(Path(directory).rglob(f"*{_END}"), key=lambda path: path.stat().st_mtime_ns)
            found = [_read(path) for path in plans]
        if not found:
            raise ValueError(
                f"no graph of {model!r} was compiled for a backward; right would be a model that torch.compile does "
                "not skip, whose parameters or inputs require a gradient, outside torch.no_grad()"
            )
        return found

    return explained


def _read(path: Path) -> Explanation:
    graph = path.name.removesuffix(_END)
    table, plan, forward, backward = (
        path.with_name(f"{graph}.{end}").read_text() for end in ("plan.txt", "plan.json", "forward.py", "backward.py")
    )
    return Explanation(graph, table, json.loads(plan), forward, backward)
