"""What each node adds to the memory traffic of the kernels that compute it.

    mm -> mul -> add -> mm      mul reads mm; add, of the same kernel, is written for the second mm
            \\-> sum             sum reads mul in registers, and is written

A kernel reads each storage once, and writes what another kernel or the caller reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ssd_fx.passes.cost.kernels import Kernels


@dataclass
class Traffic:
    """What one node adds: bytes read and written, the kernels that begin with it, and how often it is computed."""

    read: int = 0
    written: int = 0
    first: int = 0
    times: int = 1


def traffic(kernels: Kernels) -> dict[fx.Node, Traffic]:
    """An entry for every node that is computed."""
    found = {n: Traffic() for n, computed in zip(kernels.nodes, kernels.computes, strict=True) if computed}
    begun = set[int]()
    read = set[tuple[int, int]]()  # a storage, and a kernel that has read it
    written = {key for arg in kernels.nodes[-1].all_input_nodes for key in kernels.storages[kernels.index[arg]]}
    for node, one in found.items():
        i = kernels.index[node]
        inside = kernels.kernels(i)
        one.times = len(inside)
        if node.all_input_nodes:  # a constant begins no kernel
            one.first = len(inside - begun)
            begun |= inside
        for key, nbytes in kernels.reads[i].items():
            others = {k for k in inside if k != kernels.kernel.get(kernels.maker[key])}
            new = {(key, k) for k in others} - read
            one.read += nbytes * len(new)
            read |= new
            if others:
                written.add(key)
    for key in written & kernels.maker.keys():
        node = kernels.nodes[kernels.maker[key]]
        if node in found:
            found[node].written += kernels.storages[kernels.maker[key]][key]
    return found
