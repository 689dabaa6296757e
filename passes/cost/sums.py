"""Long sums, whose terms Inductor would hold until the last one is there.

    dw = mm_1 + mm_2 + ... + mm_32        the gradient of a weight that a loss in pieces, or many layers, share

Inductor computes an addition inside the addition that reads it. So one kernel at the end would read all terms, which
would live until then: 28 GiB on an H200, with Llama 3's vocabulary and 64 thousand tokens. Inductor merges a product
with its addition into one call (`addmm`), but on a GPU only if a node other than a loop reads the sum. So we have it
write each addition of a long sum to memory as soon as the terms are there (`lowering/sums.py`). The predictions assume
that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ssd_fx.passes.cost.operators import hint, nbytes_of
from ssd_fx.passes.partition import tensor_of

aten = torch.ops.aten

# Sums of up to so many terms are left alone: Inductor reads as many in one loop (`realize_acc_reads_threshold`).
SHORT = 8
# Sums of fewer bytes are left alone: a kernel for one would take longer to start than to run.
LEAST = 1 << 20
RUNNING = "ssd_fx_running_sum"  # in node.meta, once Inductor is to write the sum


def running_sums(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The additions that make up the sums of more than `SHORT` terms, without the last addition of each sum."""
    terms: dict[fx.Node, int] = {}
    for node in nodes:
        if _adds(node):
            terms[node] = sum(terms.get(n, 1) for n in node.all_input_nodes)
    found: set[fx.Node] = set()
    for node in reversed(terms):
        reader = next(iter(node.users))
        if reader in terms and (reader in found or terms[reader] > SHORT):
            found.add(node)
    return found


def _adds(node: fx.Node) -> bool:
    """Whether a node adds two tensors, which nothing else reads, and one node reads the sum."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.users) != 1 or len(node.all_input_nodes) != 2:
        return False
    made, terms = tensor_of(node), [tensor_of(n) for n in node.all_input_nodes]
    if made is None or any(term is None or _sizes(term) != _sizes(made) for term in terms):
        return False
    is_large = nbytes_of(node) >= LEAST
    return is_large and all(len(n.users) == 1 for n in node.all_input_nodes)


def _sizes(tensor: torch.Tensor) -> list[int]:
    """The sizes as numbers: to compare symbolic ones would add guards."""
    return [hint(size) for size in tensor.shape]
