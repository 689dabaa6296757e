"""Which nodes are predicted to be buffers, and how long those live."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.passes.footprint import buffers
from ssd_fx.passes.partition import storage_of


def test_views_that_meet_again_are_followed_once() -> None:
    """sin -> (view, view) -> add_ -> (view, view) -> add_ ...: 40 times two ways from a tensor to its readers."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        for _ in range(40):
            y = y.view(8, 8).add_(y.view(8, 8))
        return y @ y

    with FakeTensorMode() as mode:
        x = torch.empty(8, 8)
    with mode:
        graph = make_fx(function, tracing_mode="real")(x).graph
    nodes = list(graph.nodes)
    found = buffers(graph)
    names = {storage_of(n): n.name for n in reversed(nodes) if n.op != "output"}
    lives = {names[key]: (nodes[i].name, nodes[found.last[key]].name) for key, i in found.first.items()}
    assert lives == {"x_1": ("x_1", "sin"), "sin": ("sin", "mm"), "mm": ("mm", "mm")}
