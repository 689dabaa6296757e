"""Which nodes of a graph will be buffers of Inductor's, when those live, and what that adds up to.

What is predicted here decides only where memory is thought to be short.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ssd_fx.passes.cost.kernels import Kernels, both_kernels
from ssd_fx.passes.partition import Partition


@dataclass(frozen=True)
class Buffers:
    """The storages of one graph that will be memory, by storage key.

    `first`, `last`: indices of the nodes in whose kernels a buffer is written and read last (the output is no reader),
    as the kernels will run; `read_last`: the latest node of those kernels as the graph has them. `read_first`: the
    first node that reads it, or where the kernel runs that reads it first, if that is earlier. `nbytes`: its size;
    `held`: what the output returns; `in_place`: what a kernel writes over an input that dies there.
    """

    first: Mapping[int, int]
    last: Mapping[int, int]
    read_first: Mapping[int, int]
    read_last: Mapping[int, int]
    nbytes: Mapping[int, int]
    held: frozenset[int]
    in_place: frozenset[int]

    def alive(self, keys: Iterable[int], count: int) -> list[int]:
        """Bytes of the buffers `keys` during every one of `count` nodes."""
        change = [0] * (count + 1)
        for key in keys:
            last = count - 1 if key in self.held else self.last[key]
            first = self.first[key] + 1 if key in self.in_place else self.first[key]
            change[min(first, last)] += self.nbytes[key]
            change[last + 1] -= self.nbytes[key]
        return list(itertools.accumulate(change))[:count]


def buffers(kernels: Kernels, donated: Collection[str] = ()) -> Buffers:
    """Predict the buffers of a graph. Inputs named in `donated` may be written over when they die."""
    first = {key: kernels.at[i] for key, i in kernels.maker.items()}
    last = dict(first)
    read_last = dict(kernels.maker)
    read_first: dict[int, int] = {}
    readers: dict[int, set[int]] = {key: set() for key in first}
    for reader, key in _reads(kernels):
        inside = kernels.inside[reader] or (reader,)
        at = [kernels.at[k] for k in inside]
        read_first[key] = min(read_first.get(key, reader), reader, *at)
        last[key] = max(last[key], *at)
        read_last[key] = max(read_last[key], *inside)
        readers[key].update(inside)
    nbytes = {key: kernels.storages[i][key] for key, i in kernels.maker.items()}
    output = kernels.nodes[-1].all_input_nodes
    held = frozenset(key for n in output for key in kernels.storages[kernels.index[n]] if key in first)
    nbytes |= dict.fromkeys(_in_registers(kernels, readers) - held, 0)
    ends = {key: {k for k in readers[key] if kernels.at[k] == last[key]} for key in first.keys() - held}
    return Buffers(first, last, read_first, read_last, nbytes, held, _in_place(kernels, ends, nbytes, donated))


def _in_registers(kernels: Kernels, readers: Mapping[int, set[int]]) -> frozenset[int]:
    """What a loop writes, and only loops of the same kernel read: the kernel keeps it in registers.

    A kernel with a reduction may go over its elements twice, so what it writes may be memory.
    """

    def is_own(key: int) -> bool:
        kernel = kernels.kernel.get(kernels.maker[key])
        own = kernel is not None and kernel not in kernels.reducing and kernels.maker[key] not in kernels.calls
        return own and bool(readers[key]) and all(kernels.kernel.get(k) == kernel for k in readers[key])

    return frozenset(filter(is_own, readers))


def both_buffers(partition: Partition) -> tuple[Buffers, Buffers]:
    """The buffers of the forward and of the backward, to which the saved tensors are donated; for `Partition.once`."""
    forward, backward = partition.once(both_kernels)
    return buffers(forward), buffers(backward, {n.name for n in partition.saved})


def _reads(kernels: Kernels) -> Iterable[tuple[int, int]]:
    """Nodes, and the storages that they read; a view reads none. `copy_` is a view of its target that reads its
    source."""
    for reader, node in enumerate(kernels.nodes):
        if node.op == "output":
            continue
        own = kernels.storages[reader] if kernels.view[reader] else {}
        for source in node.all_input_nodes:
            for key in kernels.storages[kernels.index[source]]:
                if key in kernels.maker and key not in own:
                    yield reader, key


def _in_place(
    kernels: Kernels, ends: Mapping[int, set[int]], nbytes: Mapping[int, int], donated: Collection[str]
) -> frozenset[int]:
    """What a loop writes over an input of the same size that dies there and that no other loop reads there.

    `ends`: the loops that read a buffer last; those that became one kernel count each.
    """
    taken = set()
    dying: dict[int, list[int]] = {}
    for key, i in kernels.maker.items():
        mine = kernels.nodes[i].op != "placeholder" or kernels.nodes[i].name in donated
        if mine and len(readers := ends.get(key, set()) - {i}) == 1:
            dying.setdefault(readers.pop(), []).append(nbytes[key])
    for key, i in kernels.maker.items():
        sizes = dying.get(i, [])
        if nbytes[key] in sizes and kernels.computes[i] and i not in kernels.calls:
            sizes.remove(nbytes[key])
            taken.add(key)
    return frozenset(taken)
