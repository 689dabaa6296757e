"""Operators that may communicate with other ranks: they run as often as the graph says, and in its order.

    forward of every rank   mm -> all_reduce -> wait_tensor -> gelu
    one rank's backward     may compute gelu again, but never all_reduce

Ranks compile the same graphs, but each plans for its own machine: one may recompute a tensor that another loads. If a
collective runs on one rank only, or in another order there, the other ranks wait for ever. Three modules prevent that:

* `recompute.py` never chooses to compute such an operator again.
* `proposals.py` drops a partition that has them in another order than PyTorch's own.
* `lowering/order.py` keeps them in order among Inductor's kernels.

`alias/storages.py` keeps what an asynchronous collective returns, because the result of its wait is the same memory.
"""

from __future__ import annotations

from ssd_fx.compat import OpOverload
from ssd_fx.passes.partition import Partition

# The namespaces of PyTorch's operators that compute, and ours. An operator of any other one may communicate: PyTorch's
# own collectives have several (_c10d_functional, _dtensor, symm_mem).
_SILENT = frozenset({"aten", "prims", "rngprims", "inductor", "ssd_fx"})
_WAIT = "_c10d_functional::wait_tensor"


def is_silent(target: OpOverload) -> bool:
    """Whether an operator is known to compute only."""
    return target.namespace in _SILENT


def may_communicate(target: object) -> bool:
    """Whether a call may be a collective. The wait for a collective concerns no other rank, so it is none."""
    return isinstance(target, OpOverload) and not is_silent(target) and target._schema.name != _WAIT


def communication(partition: Partition) -> tuple[list[str], list[str]]:
    """The names of the nodes that may communicate, in order: of the forward, and of the backward."""
    forward = [n.name for n in partition.forward.graph.nodes if may_communicate(n.target)]
    backward = [n.name for n in partition.backward.graph.nodes if may_communicate(n.target)]
    return forward, backward
