"""What Inductor makes of a function: its schedule and the code of its graphs, without a compiler or a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch.fx.experimental.proxy_tensor import make_fx

import ssd_fx
from ssd_fx.passes.lowering import inductor
from ssd_fx.passes.lowering.order import BeforeFusion, PinOrder, is_ours
from ssd_fx.passes.partition import RECOMPUTED


@dataclass
class Lowered:
    """One graph behind the scheduler. `nodes`: in the order in which they run; `moved_bytes`: what its kernels read and
    write; `inputs`: fake ones."""

    nodes: list[BaseSchedulerNode]
    code: str
    moved_bytes: int
    inputs: list[torch.Tensor]

    @property
    def kernels(self) -> list[BaseSchedulerNode]:
        """What computes: no allocation, none of our nodes."""
        return [n for n in self.nodes if not is_ours(n) and not isinstance(n, NopKernelSchedulerNode)]


class _NotCompiled(Exception):
    """Raised where the compiled forward would run."""


def lower(
    function: Callable[..., Any],
    *args: torch.Tensor,
    options: Mapping[str, Any] | None = None,
    dynamic: bool = False,
    **patches: Any,
) -> tuple[Lowered, Lowered]:
    """Forward and backward; `options` are ours, or None for plain Inductor; `patches` go to Inductor's config."""
    torch._dynamo.reset()
    backend: Any = "inductor" if options is None else ssd_fx.backend
    settings = None if options is None else {"engine": "memory", "min_bytes": 0, "budget": 0} | dict(options)
    with (
        captured(patches) as found,
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        contextlib.suppress(_NotCompiled),
    ):
        torch.compile(function, backend=backend, options=settings, fullgraph=True, dynamic=dynamic)(*args)
    forward, backward = found
    return forward, backward


def lower_alone(function: Callable[..., Any], *args: torch.Tensor, again: Collection[str] = ()) -> Lowered:
    """A function that calls our operators itself, as one graph, its kernels in the planned order.

    `again`: names of nodes that count as computed again by our choice.
    """
    inductor.register()
    graph = make_fx(function, tracing_mode="fake")(*args)
    for node in graph.graph.nodes:
        node.meta |= {RECOMPUTED: True} if node.name in again else {}
    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    own = {"_pre_fusion_custom_pass": BeforeFusion("tests"), "_post_fusion_custom_pass": PinOrder("tests")}
    with captured(own) as found:
        compile_fx_inner(graph, inputs)
    return found[0]


@contextlib.contextmanager
def captured(patches: Mapping[str, Any]) -> Iterator[list[Lowered]]:
    found: list[Lowered] = []

    def capture(graph: GraphLowering, code: Any) -> ModuleType:
        nodes = list(graph.scheduler.nodes)
        moved = sum(n.get_read_write_buffers_sizes() for n in nodes)
        found.append(Lowered(nodes, code.value, moved, list(graph.example_inputs or ())))
        module = ModuleType("not_compiled")
        module.__file__ = __file__
        module.call = _refuse  # type: ignore[attr-defined]
        return module

    with (
        mock.patch.object(GraphLowering, "_compile_to_module_lines", capture),
        config.patch({"fx_graph_cache": False} | dict(patches)),
    ):
        yield found


def _refuse(args: object) -> None:
    raise _NotCompiled
