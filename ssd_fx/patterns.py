"""Checks that the module name patterns of `keep` and `offload` name modules of the user's program.

Names are those of `named_modules()` of the model whose `forward` was compiled, or of the model that the compiled
function calls. The names in one graph do not decide whether a pattern is wrong. One `torch.compile` may make many
graphs (graph breaks, blocks that are compiled one by one), and a pattern may name a module of a later one. So a pattern
is compared with three sets of models:

    of the graph    the models that the graph's modules belong to (`roots`)
    in reach        the models in the locals, closures and named globals of the compiled function
    running         the models whose methods are on the call stack: a block's graph is compiled while its model runs
"""

from __future__ import annotations

import difflib
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from ssd_fx import traced
from ssd_fx.compat import OptimizedModule
from ssd_fx.passes.joint.modules import enclosing, matches

_MOST = 8  # names of modules in a message
# Patterns that named a module while a model was in reach. A later graph of the same code may reach that model, and not
# the model that has the named module.
_matched: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def check(patterns: Sequence[str], graph_module: fx.GraphModule, own: Mapping[str, nn.Module]) -> None:
    """Compare patterns with the names of modules in the graph, in reach and running. `own`: the graph's `roots`.

    If a pattern names modules of this graph only by their names in a running model, it cannot be obeyed, because the
    compiled code may serve every module of that class. That is a RuntimeWarning.

    Raises:
        ValueError: a pattern names no module; the message has similar names.
    """
    if not patterns:  # f_locals of a running frame keeps its variables alive until the frame returns
        return
    reached = [*own.values(), *traced.models_in_reach()]
    names = {name for node in traced.nodes(graph_module) for name in enclosing(node, tuple(own))}
    names |= {name for model in reached for name, _ in model.named_modules()}
    missing = [pattern for pattern in patterns if not any(matches(pattern, name) for name in names)]
    for model in reached:
        _matched.setdefault(model, set()).update(set(patterns) - set(missing))
    running = _running(reached) if missing else []
    around = [m for m in running if any(inner is model for inner in m.modules() for model in reached)]
    outer = [each for model in around for each in model.named_modules()]
    known = {pattern for model in (*reached, *running) for pattern in _matched.get(model, ())}
    for pattern in missing:
        outside = [module for name, module in outer if matches(pattern, name)]
        if any(_overlap(module, model) for module in outside for model in own.values()):
            kinds = " and ".join(dict.fromkeys(type(model).__name__ for model in own.values()))
            warnings.warn(
                f"ssd_fx: module pattern {pattern!r} has no effect on {kinds}, which is compiled by itself: its "
                f"modules are called {_listed(names)} there",
                RuntimeWarning,
                stacklevel=2,
            )
        elif not outside and pattern not in known and names - {""}:
            raise ValueError(_no_match(pattern, names | {name for name, _ in outer}))


def _running(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules whose methods are on the call stack, without `models`."""
    inner = {id(model) for model in models}
    owners: dict[int, nn.Module] = {}
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not isinstance(owner, OptimizedModule) and id(owner) not in inner:
            owners[id(owner)] = owner
        frame = frame.f_back
    return list(owners.values())


def _overlap(a: nn.Module, b: nn.Module) -> bool:
    return any(m is b for m in a.modules()) or any(m is a for m in b.modules())


def _listed(names: Iterable[str]) -> str:
    known = sorted((name for name in names if name), key=lambda name: (name.count("."), name))
    more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
    return ", ".join(map(repr, known[:_MOST])) + more


def _no_match(pattern: str, names: set[str]) -> str:
    near = difflib.get_close_matches(pattern, sorted(names - {""}), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return f"module pattern {pattern!r} matches no module{hint} The modules are: {_listed(names)}."
