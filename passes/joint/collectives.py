"""What talks to other ranks: it runs as often as the graph says, and in its order.

Ranks compile the same graphs, but each plans for its own machine: one may compute a tensor again that another loads. A
collective that runs on one rank only, or in another order there, makes the others wait for ever. So what may be one is
never computed again by our choice (`recompute.py`), a partition that has them in another order than PyTorch's own is
not taken (`pipeline.py`), and Inductor's kernels keep them in order (`order.py`).
"""

from __future__ import annotations

import torch
from torch import fx

from ssd_fx.passes.partition import Partition

# PyTorch's operators that compute, and ours. Whoever brings another may communicate in it; PyTorch's own collectives
# have more than one namespace (_c10d_functional, _dtensor, symm_mem).
_SILENT = frozenset({"aten", "prims", "rngprims", "inductor", "ssd_fx"})
_WAIT = "_c10d_functional::wait_tensor"


def is_silent(target: torch._ops.OpOverload) -> bool:
    """Whether an operator is known to do nothing but compute."""
    return target.namespace in _SILENT


def may_communicate(target: object) -> bool:
    """Whether a call is a collective, or one of which that cannot be told; to wait for one concerns no other rank."""
    return isinstance(target, torch._ops.OpOverload) and not is_silent(target) and target._schema.name != _WAIT


def communication(partition: Partition) -> tuple[list[str], list[str]]:
    """The names of the nodes of the forward and of the backward that may communicate, in order."""
    return _named(partition.forward.graph), _named(partition.backward.graph)


def _named(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if may_communicate(n.target)]
