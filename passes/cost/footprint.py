"""Which nodes of a graph will be buffers of Inductor's, when these live, and how many bytes are alive at a time.

The predictions decide only where memory is thought to be short.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ssd_fx.passes.cost.kernels import Kernels, both_kernels, is_on_cpu
from ssd_fx.passes.cost.operators import SCATTERS, operator_of
from ssd_fx.passes.cost.strides import Strides
from ssd_fx.passes.cost.workspace import workspace_bytes
from ssd_fx.passes.partition import Partition, storage_key, tensors_of


@dataclass(frozen=True)
class Buffers:
    """The storages of one graph that will be buffers, by storage key. A kernel runs at the place of a node.

    `first`, `last`: the places of the kernels that write a buffer and that read it last (the output is no reader).
    `read_last`: of the loops and calls that read it, the last by its place in the graph, wherever its kernel runs.
    `read_first`: the first node that reads it, or the place of a kernel that reads it, if that is earlier. `nbytes`:
    its bytes. `held`: the buffers that the graph returns. `in_place`: the buffers that a kernel writes over an input
    that dies there, each with that input. `functions`: by place of a kernel, the first and the last place of the C++
    function that it becomes a part of. `within`: by place of a call, the bytes that the call takes, and gives back when
    it ends.
    """

    first: Mapping[int, int]
    last: Mapping[int, int]
    read_first: Mapping[int, int]
    read_last: Mapping[int, int]
    nbytes: Mapping[int, int]
    held: frozenset[int]
    in_place: Mapping[int, int]
    functions: Mapping[int, tuple[int, int]]
    within: Mapping[int, int]

    def alive(self, keys: Iterable[int], count: int) -> list[int]:
        """Bytes alive during each of `count` nodes: those of the buffers `keys`, and those that a call takes
        (`within`). Other buffers are counted elsewhere.

        A C++ function has all its results in memory before any buffer that it reads is freed.
        """
        change = [0] * (count + 1)
        counted = set(keys)
        # the inputs over which a buffer is written that is counted elsewhere
        over = {source for key, source in self.in_place.items() if key not in counted}
        for key in counted:
            first, last = self.first[key], self.last[key]
            begin, end = self.functions.get(first, (first, first))[0], self.functions.get(last, (last, last))[1]
            if key in over:
                end = last - 1
            if key in self.in_place:
                begin = (self.functions.get(first, (first, first))[1] if self.in_place[key] in counted else first) + 1
            if key in self.held:
                end = count - 1
            if begin <= end:
                change[begin] += self.nbytes[key]
                change[end + 1] -= self.nbytes[key]
        for at, nbytes in self.within.items():
            change[at] += nbytes
            change[at + 1] -= nbytes
        return list(itertools.accumulate(change))[:count]

    def cut(self, before: Sequence[int]) -> Buffers:
        """The same buffers, with the C++ functions cut at calls. A call stands before each of the nodes `before`, which
        are sorted."""
        functions: dict[tuple[int, int], list[int]] = {}  # by piece of a function, the places of its kernels
        for place, (first, _) in sorted(self.functions.items()):
            functions.setdefault((first, bisect_right(before, place)), []).append(place)
        return replace(self, functions={at: (run[0], run[-1]) for run in functions.values() for at in run})


def buffers(kernels: Kernels, donated: Collection[str] = ()) -> Buffers:
    """Predict the buffers of a graph. `donated`: names of inputs that may be written over when they die, as Inductor
    uses the word."""
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
    strides = Strides(kernels)
    nbytes |= dict.fromkeys(_in_registers(kernels, strides, readers) - held, 0)
    ends = {key: {k for k in readers[key] if kernels.at[k] == last[key]} for key in first.keys() - held}
    in_place = _in_place(kernels, strides, ends, nbytes, donated)
    calls = {i: workspace_bytes(kernels.nodes[i]) for i in kernels.calls}
    within = {max(kernels.at[k] for k in kernels.inside[i]): taken for i, taken in calls.items() if taken}
    return Buffers(first, last, read_first, read_last, nbytes, held, in_place, kernels.functions(), within)


def _in_registers(kernels: Kernels, strides: Strides, readers: Mapping[int, set[int]]) -> frozenset[int]:
    """The results of loops that only loops of the same kernel read: the kernel keeps them in registers.

    A kernel with a reduction may go over its elements twice, and a result that it needs both times is in memory. On the
    CPU only one row of the result is in memory, if all loops go row by row (`try_outer_loop_fusion_with_local_buf`,
    torch 2.13).
    """

    def is_own(key: int) -> bool:
        maker = kernels.maker[key]
        kernel = kernels.kernel.get(maker)
        if kernel is None or maker in kernels.calls or not readers[key]:
            return False
        if any(kernels.kernel.get(k) != kernel for k in readers[key]):
            return False
        if kernel not in kernels.reducing:
            return True
        by_rows = maker not in kernels.sums and is_on_cpu(kernels.nodes[maker])
        return by_rows and all(key in strides.read_in_order(k) for k in readers[key] - {maker})

    return frozenset(filter(is_own, readers))


def both_buffers(partition: Partition) -> tuple[Buffers, Buffers]:
    """The buffers of the forward, and of the backward, which may write over the saved tensors; for `Partition.once`."""
    forward, backward = partition.once(both_kernels)
    return buffers(forward), buffers(backward, {n.name for n in partition.saved})


def _reads(kernels: Kernels) -> Iterable[tuple[int, int]]:
    """Pairs of a node and a storage that it reads. A view reads no storage. `copy_` is a view of its target that reads
    its source."""
    for reader, node in enumerate(kernels.nodes):
        if node.op == "output":
            continue
        own = kernels.storages[reader] if kernels.view[reader] else {}
        for source in node.all_input_nodes:
            for key in kernels.storages[kernels.index[source]]:
                if kernels.is_read(key, reader) and key not in own:
                    yield reader, key


def _in_place(
    kernels: Kernels,
    strides: Strides,
    ends: Mapping[int, set[int]],
    nbytes: Mapping[int, int],
    donated: Collection[str],
) -> dict[int, int]:
    """The results that a loop writes over an input, each with that input. The input has the same size and dtype and
    dies there, and the loop reads its elements in the order in which it writes. Other loops of the same kernel may read
    the input too, if this loop reads their results. No loop writes over the result of a scatter, which wrote over its
    own operand (`decide_inplace_update`, torch 2.13).

    `ends`: for each buffer, the loops that read it in the kernel that reads it last.
    """
    scatters = {i: kernels.operand(i) for i, node in enumerate(kernels.nodes) if operator_of(node) in SCATTERS}
    makers: dict[int, list[int]] = {}  # the buffers that each loop writes
    for key, i in kernels.maker.items():
        if kernels.computes[i] and (i not in kernels.calls or i in scatters) and nbytes[key]:
            makers.setdefault(i, []).append(key)
    taken: dict[int, int] = {}
    for key, i in kernels.maker.items():
        if i in scatters or (kernels.nodes[i].op == "placeholder" and kernels.nodes[i].name not in donated):
            continue
        readers = ends.get(key, set()) - {i}
        if not readers or not all(key in strides.read_in_order(k) for k in readers):
            continue
        for reader in (k for k in readers & makers.keys() if key in scatters.get(k, {key})):
            alike = (k for k in makers[reader] if k not in taken and _are_alike(kernels, key, k, nbytes))
            result = next(alike, None)
            if result is not None and kernels.comes_behind(reader, readers):
                taken[result] = key
                break
    return taken


def _are_alike(kernels: Kernels, a: int, b: int, nbytes: Mapping[int, int]) -> bool:
    return nbytes[a] == nbytes[b] and _dtype(kernels, a) == _dtype(kernels, b)


def _dtype(kernels: Kernels, key: int) -> object:
    return next(t.dtype for t in tensors_of(kernels.nodes[kernels.maker[key]]) if storage_key(t) == key)
