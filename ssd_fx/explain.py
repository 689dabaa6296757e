"""Reports: before training, with plans and rewritten graphs as values (`explain`), and after steps (`report`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ssd_fx.backend import NAME, check_options, compile_graph
from ssd_fx.report.dump import Explanation
from ssd_fx.report.model import GraphReport, step_of
from ssd_fx.report.report import Report, made
from ssd_fx.report.timeline import measured
from ssd_fx.runtime import entries, plans, trace
from ssd_fx.runtime import stats as counts
from ssd_fx.runtime.stats import stats
from ssd_fx.survey import name_of


def explain(
    model: Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Callable[..., Report]:
    """Return a function that takes the inputs of `model` and returns a `Report` of what ssd_fx would do.

        report = ssd_fx.explain(model, options={"budget": 0.5})(tokens, targets)
        print(report)
        report.save("report.html")

    `report.dumps` has the plan and the code of each graph, in the order in which they were compiled, equal ones once.

    The function compiles the model and runs its forward once. That draws random numbers and changes buffers, as a
    forward does. It also calls `torch._dynamo.reset()`, so what the process compiled before is compiled again when it
    runs next. `options` are those of the backend, `dynamic` and `fullgraph` as in `torch.compile`. For a test of a toy,
    `{"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0}` gives the same plan on every
    machine, in a second and without a drive.

    Raises:
        ValueError, OSError: at once, what `check_options` raises. When the function is called, a budget or a pattern of
            module names that does not suit a graph.
        ValueError: when the function is called, nothing was compiled for a backward.
    """
    check_options(options)

    def explained(*args: Any, **kwargs: Any) -> Report:
        with _turn:
            torch._dynamo.reset()  # Dynamo compiles a function eight times at most
            compiled = torch.compile(
                model, backend=_backend, options=dict(options or {}), dynamic=dynamic, fullgraph=fullgraph
            )
            _taken.clear()
            began = time.perf_counter()
            try:
                with counts.apart():
                    compiled(*args, **kwargs)
                    entries.living()  # deals with the deaths of what the forward has stored
                found = list(_taken.values())
            finally:
                _taken.clear()
                torch._dynamo.reset()
        if not found:
            raise ValueError(
                f"no graph of {name_of(model)} was compiled for a backward; right would be a model that torch.compile "
                "does not skip, whose parameters or inputs require a gradient, outside torch.no_grad()"
            )
        order = [e.graph for e in trace.events() if e.kind == "begin" and e.started >= began]
        return made([GraphReport.unpacked(dump.about) for dump in found], order, dumps=found)

    return explained


def report() -> Report:
    """Return a `Report` of the steps since the start or the last `reset_stats()`: predicted, and measured beside it.

    What is predicted belongs to the compiled graphs, so ask while the compiled model lives. Without one the report says
    why, with what was measured: of `ssd_fx.checkpoint` alone, or of graphs that are gone. `missing` has the reason.
    """
    found = stats()
    if not found.graphs:
        return made((), (), stats=found, missing=found.nothing_ran())
    packed = plans.packed()
    known = [GraphReport.unpacked(packed[graph]) for graph in found.graphs if graph in packed]
    step = measured(event for event in trace.events() if event.graph in found.graphs)
    order = step.order if step else ()
    missing = "" if known else _without_plans(found.graphs)
    return made(step_of(known, step), order, stats=found, slots=counts.slots(), step=step, missing=missing)


def _without_plans(graphs: Iterable[str]) -> str:
    """Why none of the graphs that ran has a plan."""
    if all(graph.startswith(counts.CHECKPOINT) for graph in graphs):
        return "ssd_fx.checkpoint ran alone, which plans nothing: all arguments from min_bytes on leave"
    return (
        "the compiled graphs are gone, and their plans with them; right would be ssd_fx.report() while the compiled "
        "model lives, before torch._dynamo.reset()"
    )


_turn = threading.RLock()
"""Lets one thread explain at a time: the dumps in `_taken`, and the counts that are put aside, are the process's."""

_taken: dict[str, Explanation] = {}
"""The dumps by graph, in the order of compilation. Global, because `_take` is pickled and may own no state."""


def _take(dump: Explanation) -> None:
    _taken.setdefault(dump.graph, dump)


def _after_fork() -> None:
    """In the child no other thread explains."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _backend(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], **given: Any) -> Any:
    return compile_graph(gm, inputs, report=_take, **given)


_backend.__name__ = NAME  # by which Dynamo treats it as registered: `backend._register`
