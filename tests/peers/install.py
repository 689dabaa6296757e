"""Puts ssd_fx's partitioner in the place of PyTorch's two, for everything in the process that refers to them.

    torch._functorch.partitioners.min_cut_rematerialization_partition   ->  ssd_fx.passes.partitioner.Partitioner
    torch._functorch.partitioners.default_partition                     ->  the stock partition, then ssd_fx's pipeline

Names of both are bound in a dozen modules of PyTorch, in default arguments, in partials, in registered backends and in
the test files themselves. So it is the code of the two function objects that is replaced: no reference escapes.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners

from ssd_fx.backend import plan_options
from ssd_fx.config import Config
from ssd_fx.passes import pipeline
from ssd_fx.passes.decide import decide
from ssd_fx.passes.joint.marks import lift
from ssd_fx.passes.lowering import compiled_autograd, inductor, order
from ssd_fx.passes.partition import Partition, activation_names, untrained_names
from ssd_fx.passes.partitioner import Partitioner

Graphs = tuple[fx.GraphModule, fx.GraphModule]
PARTITIONERS = ("stock", "ours", "flipped")  # "flipped": ours with a planted fault


@dataclass
class Count:
    """Calls of our partitioner so far, and alias groups that it offloaded."""

    calls: int = 0
    groups: int = 0


COUNT = Count()
_inside = threading.local()
_instead: dict[str, Callable[..., Graphs]] = {}  # by name, what the two functions do now


def install(name: str, options: Mapping[str, Any]) -> None:
    """Once a process. `name`: one of PARTITIONERS, "stock" changes nothing; `options`: of ssd_fx.

    Raises:
        ValueError: an unknown name, or options that are wrong.
    """
    if name not in PARTITIONERS:
        raise ValueError(f"partitioner {name!r} is unknown; right would be one of {', '.join(PARTITIONERS)}")
    if name == "stock":
        return
    given = {"machine": "default", "recompute": False, "budget": 0, "min_bytes": 0, **options}
    planned = plan_options(Config.make(given), torch.device("cpu"))
    flip = name == "flipped"
    _replace(partitioners.min_cut_rematerialization_partition, _min_cut, _Ours(Partitioner(planned), flip))
    _replace(partitioners.default_partition, _default, _Ours(_Default(planned), flip))
    _prepare_inductor()


def _min_cut(*args, **kwargs):  # type: ignore[no-untyped-def]
    from tests.peers.install import _instead

    return _instead["min_cut_rematerialization_partition"](*args, **kwargs)


def _default(*args, **kwargs):  # type: ignore[no-untyped-def]
    from tests.peers.install import _instead

    return _instead["default_partition"](*args, **kwargs)


def _replace(function: Any, trampoline: Any, ours: _Ours) -> None:
    """`trampoline` runs with the globals of `function`, which is why it imports what it needs."""
    stock: Any = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    stock.__kwdefaults__ = function.__kwdefaults__
    ours.stock = stock
    _instead[function.__name__] = ours
    function.__code__ = trampoline.__code__
    function.__defaults__ = function.__kwdefaults__ = None


class _Ours:
    """What a stock partitioner's callers call; what our own partitioner asks of it inside is answered by the stock."""

    stock: Callable[..., Graphs]

    def __init__(self, partition: Callable[..., Graphs], flip: bool) -> None:
        self._partition, self._flip = partition, flip

    def __call__(self, gm: fx.GraphModule, inputs: Any, *compiler: str, **kwargs: Any) -> Graphs:
        if getattr(_inside, "active", False):
            return self.stock(gm, inputs, *compiler, **kwargs)
        if compiler:
            kwargs["compiler"] = compiler[0]
        _inside.active = True
        try:
            forward, backward = self._partition(gm, inputs, **kwargs)
        finally:
            _inside.active = False
        COUNT.calls += 1
        COUNT.groups += len(forward.graph.find_nodes(op="call_function", target=torch.ops.ssd_fx.store.default))
        if self._flip:
            flip_loads(backward)
        return forward, backward


class _Default:
    """`default_partition`, then our pipeline: what it saves leaves, and nothing is partitioned otherwise."""

    def __init__(self, options: pipeline.PlanOptions) -> None:
        self._options = options

    def __call__(self, gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Graphs:
        lift(gm.graph)
        activations = activation_names(gm, kwargs.get("static_lifetime_input_indices"))
        forward, backward = _instead["default_partition"].stock(gm, inputs, **kwargs)  # type: ignore[attr-defined]
        untrained = untrained_names(gm)
        partition = Partition(forward, backward, kwargs["num_fwd_outputs"], activations, untrained)
        plan = decide(partition, self._options)
        pipeline.rewrite(partition, plan, self._options)
        return partition.forward, partition.backward


def _prepare_inductor() -> None:
    """What `ssd_fx.backend` sets for one compilation, for every one of the process."""
    from torch._inductor import config
    from torch._inductor.fx_passes import post_grad

    inductor.register()
    config._post_fusion_custom_pass = order.PinOrder("peers")
    config.allow_buffer_reuse = config.combo_kernels = False
    reorder = post_grad.reorder_for_locality
    # It moves loads, in backward graphs that compiled autograd traced; so the backend turns it off for those.
    post_grad.reorder_for_locality = lambda graph: None if compiled_autograd.loads(graph) else reorder(graph)


def flip_loads(backward: fx.GraphModule) -> None:
    """The planted fault: all that is computed from a loaded tensor of numbers is computed from its negative."""
    for load in backward.graph.find_nodes(op="call_function", target=torch.ops.ssd_fx.load.default):
        value = load.meta["val"]
        wait = next(n for n in load.users if n.target is torch.ops.ssd_fx.wait_load_.default)
        if not (value.is_floating_point() or value.is_complex()):
            continue
        with backward.graph.inserting_after(wait):
            negative = backward.graph.call_function(torch.ops.aten.neg.default, (load,))
        negative.meta["val"] = -value
        for user in [u for u in load.users if u not in (wait, negative)]:
            user.replace_input_with(load, negative)
    backward.recompile()
