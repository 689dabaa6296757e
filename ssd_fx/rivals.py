"""Ways of PyTorch that need less memory without a drive. A table has them beside ours.

A rival is the same model, trained with a checkpoint around each of its layers, or cut by PyTorch under its
`activation_memory_budget`. All that its own forward saves then stays in memory.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn
from torch.utils.checkpoint import checkpoint

from ssd_fx.compat import functorch_config, layers_may_fill_caches
from ssd_fx.passes.decide import decide
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.proposals import cut

CHECKPOINT, BUDGETED = "checkpoint per layer", "PyTorch's budget"
SHARES = (0.5, 0.75)  # of PyTorch's budget; each is one more cut of the joint graph


def budgeted(share: float) -> str:
    """The name of PyTorch's budget of that share."""
    return f"{BUDGETED} {share:g}"


def kept(joint: Joint, options: PlanOptions) -> Plan:
    """The plan of PyTorch's own partition with everything kept, whatever the options and the model's marks say."""
    alone = replace(options, budget=1.0, recompute=False)
    own = cut(joint, alone)
    return decide(own.partition, alone, budget=1.0, analysed=own.plan.with_(marks={}))


def kept_under(share: float, joint: Joint, options: PlanOptions) -> Plan:
    """`kept`, of the partition that PyTorch makes under a share of its `activation_memory_budget`. Copies `joint`."""
    with functorch_config.patch(activation_memory_budget=share):
        return kept(joint.copy(), options)


def layers_of(*models: Callable[..., Any]) -> list[nn.Module]:
    """The modules to put checkpoints around: those of the class of which some container has the most.

    Containers are every ModuleList, ModuleDict and Sequential, and `models` itself, which may be blocks that are called
    one by one. PyTorch's own modules without parts, such as Linear, are no layers, nor are modules within a layer.
    Empty if no container has two modules of a class. A function stands for the modules that it refers to.
    """
    roots = [r for model in models for r in ([model] if isinstance(model, nn.Module) else _referred(model))]
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    lists = [[*m.children()] for r in roots for m in r.modules() if isinstance(m, kinds)]
    lists.append([model for model in models if isinstance(model, nn.Module)])
    counts = [Counter(type(each) for each in members if _is_layer(each)) for members in lists]
    most = max((pair for count in counts for pair in count.most_common(1)), key=lambda pair: pair[1], default=None)
    if most is None or most[1] < 2:
        return []
    found = dict.fromkeys(each for members in lists for each in members if type(each) is most[0])
    within = {part for each in found for part in each.modules() if part is not each}
    return [each for each in found if each not in within]


def _is_layer(module: nn.Module) -> bool:
    return any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")


def _referred(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function refers to by a name outside of it, or that it is a method of."""
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    named = [owner, *getattr(owner, "__dict__", {}).values()]
    if inspect.isfunction(inside := getattr(function, "__func__", function)):
        names = inspect.getclosurevars(inside)
        named += [*names.nonlocals.values(), *names.globals.values()]
    return [getattr(each, "_orig_mod", each) for each in named if isinstance(each, nn.Module)]


@contextmanager
def checkpointed(layers: Sequence[nn.Module], context: Callable[[], Any] | None = None) -> Iterator[None]:
    """Within, each of the layers is called under a checkpoint, which saves what the policy of `context` says."""
    more: dict[str, Any] = {"context_fn": context} if context else {}
    with ExitStack() as stack:
        stack.enter_context(layers_may_fill_caches())
        for each in layers:
            stack.enter_context(mock.patch.object(each, "forward", _under_checkpoint(each.forward, more)))
        yield


def _under_checkpoint(forward: Callable[..., Any], more: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)

    return called
