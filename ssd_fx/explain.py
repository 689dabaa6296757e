"""Plans and rewritten graphs of a model, as values: to look at, and for tests of toy graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ssd_fx.backend import check_options, compile_graph
from ssd_fx.report.dump import Explanation


def explain(
    model: Callable[..., Any],
    *,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Callable[..., list[Explanation]]:
    """Return a function that takes the inputs of `model` and returns an `Explanation` of each of its graphs.

    They come in the order in which they were compiled, equal ones once.

        for graph in ssd_fx.explain(model, options={"budget": 0.5})(tokens, targets):
            print(graph)

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

    def explained(*args: Any, **kwargs: Any) -> list[Explanation]:
        torch._dynamo.reset()  # Dynamo compiles a function eight times at most
        backend = partial(compile_graph, report=_take)
        compiled = torch.compile(
            model, backend=backend, options=dict(options or {}), dynamic=dynamic, fullgraph=fullgraph
        )
        _taken.clear()
        try:
            compiled(*args, **kwargs)
            found = list(_taken.values())
        finally:
            _taken.clear()
            torch._dynamo.reset()
        if not found:
            raise ValueError(
                f"no graph of {model!r} was compiled for a backward; right would be a model that torch.compile does "
                "not skip, whose parameters or inputs require a gradient, outside torch.no_grad()"
            )
        return found

    return explained


_taken: dict[str, Explanation] = {}
"""By graph, in the order in which they were compiled. Global, because `_take` is pickled and may own no state."""


def _take(made: Explanation) -> None:
    _taken.setdefault(made.graph, made)
