"""Backward graphs that compiled autograd traced: our nodes in graphs that no partitioner made.

Compiled autograd copies the backward of every compiled graph into one graph, and compiles that like inference. Tracing
makes the wait functional. Inductor makes it work in place again; an interpreted graph would fill a copy of `load`.

    before    auto = auto_functionalized_v2(wait_load_, handle=h, seq=3, _x_base_index=0, _all_bases=[load])
              x = auto[1]
    after     wait_load_(load, h, 3); x = load
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.compat import auto_functionalized_v2

ops = torch.ops.ssd_fx


def loads(graph: fx.Graph) -> bool:
    """Whether the graph has loads of ours."""
    return bool(graph.find_nodes(op="call_function", target=ops.load.default))


def wait_in_place(graph: fx.Graph) -> None:
    """Make every functional wait one that fills the tensor which its load returned."""
    for call in graph.find_nodes(op="call_function", target=auto_functionalized_v2):
        if call.args[0] is ops.wait_load_.default:
            _in_place(call)
    graph.lint()


def _in_place(call: fx.Node) -> None:
    bases = call.kwargs["_all_bases"]
    assert isinstance(bases, Sequence)
    loaded = bases[0]
    assert isinstance(loaded, fx.Node)
    assert loaded.target is ops.load.default, f"{call} waits for {loaded}, which no load returned"
    with call.graph.inserting_before(call):
        arguments = (loaded, call.kwargs["handle"], call.kwargs["seq"])
        call.graph.call_function(ops.wait_load_.default, arguments).meta["val"] = None
    for item in list(call.users):  # 0: what the wait returns, None; 1: the tensor
        if item.args[1] == 1:
            item.replace_all_uses_with(loaded)
        call.graph.erase_node(item)
    call.graph.erase_node(call)
