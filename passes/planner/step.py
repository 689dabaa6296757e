"""A partitioned graph with its alias groups -> the `Step` that is replayed.

Nodes are merged into operators as far as nothing happens between them: an operator ends behind a node that takes time,
and where a group is produced or read last. An operator begins where a group is read first. All results of a library
call are there when the call ends, so the `getitem` nodes that take its result apart belong to its operator.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ssd_fx.passes.axis import Choice, Item, Shared, Step
from ssd_fx.passes.cost.footprint import Buffers, both_buffers
from ssd_fx.passes.cost.kernels import Kernels, both_kernels
from ssd_fx.passes.partition import RECOMPUTED, Partition, storage_of
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.schedule import EMPTY, Schedule


def model(
    partition: Partition, plan: Plan, choices: Mapping[int, frozenset[Choice]], schedule: Schedule = EMPTY
) -> Step:
    """The step of a partition. `choices`: those allowed for every slot of `plan.items`; a group that may only be kept
    is no item of the step. `schedule`: our nodes, which cut C++ functions; they change nothing but the bytes alive."""
    return _Modelling(partition, plan, choices, schedule).run()


@dataclass
class _Modelling:
    """Cuts either graph into operators. `behind`: how many nodes the forward has."""

    partition: Partition
    plan: Plan
    choices: Mapping[int, frozenset[Choice]]
    schedule: Schedule = EMPTY

    def __post_init__(self) -> None:
        assert self.plan.node_ms is not None
        self.fwd_ms, self.bwd_ms = self.plan.node_ms
        self.behind = len(self.fwd_ms) - 1

    def run(self) -> Step:
        forward, backward = self._forward_cuts(), self._backward_cuts()
        found = {slot: self._item(slot, item, forward, backward) for slot, item in self.plan.items.items()}
        kept = [item for item in found.values() if item.choices == {Choice.KEEP}]
        items = {slot: item for slot, item in found.items() if item.choices != {Choice.KEEP}}
        operators = [*itertools.pairwise(forward), *itertools.pairwise(self.behind + cut for cut in backward)]
        return Step(
            self._seconds(forward, backward),
            self._alive(forward, backward, kept),
            len(forward) - 1,
            self._linked(items),
            shared=self._shared(tuple(items)),
            launches=self.plan.launches.step,
            slots=tuple(items),
            nodes=tuple((begin, end - 1) for begin, end in operators),
        )

    def _seconds(self, forward: list[int], backward: list[int]) -> tuple[float, ...]:
        pairs = ((forward, self.fwd_ms), (backward, self.bwd_ms))
        return tuple((starts[e] - starts[b]) / 1e3 for cuts, starts in pairs for b, e in itertools.pairwise(cuts))

    def _alive(self, forward: list[int], backward: list[int], kept: list[Item]) -> tuple[int, ...]:
        """Bytes alive during every operator whatever is chosen, with the items `kept`, which have no choice."""
        pairs = zip((forward, backward), self._base(), strict=True)
        base = [max(alive[b:e]) for cuts, alive in pairs for b, e in itertools.pairwise(cuts)]
        change = [0] * (len(base) + 1)
        for item in kept:
            change[item.produced] += item.nbytes
            change[item.last_bwd_use + 1] -= item.nbytes
        return tuple(map(operator.add, base, itertools.accumulate(change)))

    def _linked(self, items: Mapping[int, Item]) -> tuple[Item, ...]:
        """The items, by slot, each with the indices of those that must be there when it is computed again."""
        index = {slot: i for i, slot in enumerate(items)}
        return tuple(replace(item, needs=self._needs(slot, index)) for slot, item in items.items())

    def _shared(self, slots: Sequence[int]) -> tuple[Shared, ...]:
        """The cost of computing again the nodes that several items need, by those items."""
        needed_by: dict[str, list[int]] = {}
        for i, slot in enumerate(slots):
            price = self.plan.prices.get(slot)
            for name in price.nodes if price else ():
                needed_by.setdefault(name, []).append(i)
        starts, again = self.fwd_ms, self.plan.launches.again
        seconds, launches = dict[tuple[int, ...], float](), Counter[tuple[int, ...]]()
        for at, node in enumerate(self.partition.forward.graph.nodes if needed_by else ()):
            items = tuple(needed_by.get(node.name, ()))
            if len(items) > 1 and starts[at + 1] > starts[at]:
                seconds[items] = seconds.get(items, 0.0) + (starts[at + 1] - starts[at]) / 1e3
                launches[items] += node.name in again
        return tuple(Shared(each, items, launches[items]) for items, each in seconds.items())

    def _forward_cuts(self) -> list[int]:
        """Indices at which operators of the forward begin, and the number of nodes."""
        starts = self.fwd_ms
        ends = {i for i in range(1, len(starts)) if starts[i] > starts[i - 1]}
        for item in self.plan.items.values():
            ends |= {item.produced + 1, item.last_use + 1}
        count = len(starts) - 1
        ends = _behind_items(self.partition.forward.graph, ends)
        return sorted({0, *ends, count - 1, count})  # nothing of ours stands behind the output

    def _backward_cuts(self) -> list[int]:
        starts = self.bwd_ms
        begin = next(i for i, n in enumerate(self.partition.backward.graph.nodes) if n.op != "placeholder")
        cuts = {i for i in range(begin + 1, len(starts)) if starts[i] > starts[i - 1]}
        for item in self.plan.items.values():
            first, last = item.first_use - self.behind, item.last_bwd_use - self.behind
            cuts |= {max(first, begin), max(last, begin) + 1}
        return sorted({begin, *_behind_items(self.partition.backward.graph, cuts), len(starts) - 1})

    def _item(self, slot: int, item: Item, forward: list[int], backward: list[int]) -> Item:
        """An item on the axis of nodes, moved to the axis of operators."""
        price = self.plan.prices.get(slot)
        count = len(forward) - 1

        def at(cuts: list[int], node: int) -> int:
            return max(bisect_right(cuts, node) - 1, 0)

        return replace(
            item,
            produced=at(forward, item.produced),
            last_use=at(forward, item.last_use),
            first_use=count + at(backward, item.first_use - self.behind),
            last_bwd_use=count + at(backward, item.last_bwd_use - self.behind),
            recompute_s=price.seconds if price else math.inf,
            launches=price.launches if price else 0,
            choices=self.choices[slot],
        )

    def _needs(self, slot: int, index: Mapping[int, int]) -> tuple[int, ...]:
        price = self.plan.prices.get(slot)
        return tuple(sorted(index[s] for s in price.needs if s in index)) if price else ()

    def _base(self) -> tuple[list[int], list[int]]:
        """Bytes alive during every node of both graphs that belong to none of `plan.items`: transients, gradients,
        outputs, and groups with an obstacle; and bytes of items beyond their span on the axis."""
        forward, backward = self.partition.once(both_buffers)
        kernels, _ = self.partition.once(both_kernels)
        # our nodes stand behind the kernel that makes a tensor, and this kernel may run behind the tensor's node
        made = {slot: kernels.at[maker] for slot, maker in self._makers(kernels).items()}
        stored = sorted(max(event.at, made.get(event.slot, 0)) + 1 for event in self.schedule.forward)
        loaded = [event.at - self.behind for event in self.schedule.backward]
        return self._forward_base(forward.cut(stored)), self._backward_base(backward.cut(loaded))

    def _makers(self, kernels: Kernels) -> dict[int, int]:
        """The node whose kernel writes the group, by slot."""
        storages = {n.name: storage_of(n) for n in kernels.nodes}
        makers = {g.slot: kernels.maker.get(storages[g.base] or 0) for g in self.plan.groups}
        return {slot: maker for slot, maker in makers.items() if maker is not None}

    def _forward_base(self, buffers: Buffers) -> list[int]:
        graph = self.partition.forward.graph
        ours = {m.name for group in self.plan.groups if group.slot in self.plan.items for m in group.members}
        elsewhere = {storage_of(n) for n in self.partition.saved if n.name in ours}  # they are counted as items
        # the caller holds them during the forward
        given = {storage_of(n) for n in self.partition.activation_inputs} - elsewhere
        elsewhere |= {storage_of(n) for n in graph.find_nodes(op="placeholder")}  # they are there before the step
        made = buffers.alive([key for key in buffers.first if key not in elsewhere], len(graph.nodes))
        held = sum(nbytes for key, nbytes in buffers.nbytes.items() if key in given)
        beside = map(operator.add, self._made_early(buffers), self._read_on(buffers))
        return [held + alive + more for alive, more in zip(made, beside, strict=True)]

    def _read_on(self, buffers: Buffers) -> list[int]:
        """For groups of which a copy is stored: their bytes from the copy's release to the forward's last read.

        Where the search keeps such a group, these bytes count twice.
        """
        nodes = {n.name: n for n in self.partition.forward.graph.nodes}
        change = [0] * (len(nodes) + 1)
        for group in self.plan.groups:
            item, base = self.plan.items.get(group.slot), nodes[group.base]
            if item is None or group.pack is None or not group.pack.copy or self.choices[group.slot] == {Choice.KEEP}:
                continue
            key = storage_of(base)
            assert key is not None
            last = max(buffers.last[key], buffers.read_last[key])
            if base.op == "placeholder":  # the caller has it until the forward returns
                last = len(nodes) - 2
            if last > item.last_use:
                change[item.last_use + 1] += item.nbytes
                change[last + 1] -= item.nbytes
        return list(itertools.accumulate(change))[:-1]

    def _made_early(self, buffers: Buffers) -> list[int]:
        """Bytes of the groups that a kernel writes earlier than their place in the graph.

        A group can be stored from its own place on. But a kernel writes all its results at once. So its groups count
        from where the kernel runs, or where the first of them can be stored, if that is earlier. On the CPU they count
        from the beginning of the kernel's C++ function, if that is earlier still. Only groups count here: the kernel's
        other results count from the place of the kernel, or of its function, on (`Buffers.alive`).
        """
        kernels, _ = self.partition.once(both_kernels)
        made: dict[int, list[Item]] = {}  # by the kernel that makes them
        for slot, maker in self._makers(kernels).items():
            if slot in self.plan.items and maker in kernels.kernel and maker not in kernels.calls:
                made.setdefault(kernels.kernel[maker], []).append(self.plan.items[slot])
        change = [0] * (len(kernels.nodes) + 1)
        for kernel, items in made.items():
            place = kernels.at[kernel]
            first = min(place, *(item.produced for item in items))
            begin = min(first, buffers.functions.get(place, (place, place))[0])
            for item in items:
                if first < item.produced:
                    change[begin] += item.nbytes
                    change[item.produced] -= item.nbytes
        return list(itertools.accumulate(change))[:-1]

    def _backward_base(self, buffers: Buffers) -> list[int]:
        graph, given = self.partition.backward.graph, self.partition.forward.graph.find_nodes(op="placeholder")
        placeholders, before = graph.find_nodes(op="placeholder"), {storage_of(n) for n in given}
        ours = {m.name for g in self.plan.groups if g.slot in self.plan.items for m in g.members}
        stuck = {m.name for g in self.plan.groups for m in g.members}
        stuck |= {n.name for n in self.partition.saved if storage_of(n) not in before}  # a saved output has no group
        kept = {storage_of(n) for n in placeholders if n.name in stuck - ours}
        elsewhere = {storage_of(n) for n in placeholders} - kept
        return buffers.alive([key for key in buffers.first if key not in elsewhere], len(graph.nodes))


def computed_again(partition: Partition, spans: Sequence[tuple[int, int]]) -> frozenset[str]:
    """Names of the nodes that the backward computes again by our choice, and that are in memory in any of `spans`. A
    span is the first and the last node of an operator."""
    _, buffers = partition.once(both_buffers)
    behind, found = len(partition.forward.graph.nodes), set()
    for node in partition.backward.graph.nodes:
        key = storage_of(node)
        if RECOMPUTED in node.meta and key is not None and key in buffers.first:
            first, last = behind + buffers.first[key], behind + buffers.last[key]
            if any(first <= end and begin <= last for begin, end in spans):
                found.add(node.name)
    return frozenset(found)


def _behind_items(graph: fx.Graph, cuts: Iterable[int]) -> set[int]:
    """`cuts`, moved behind the `getitem` nodes there, which take a call's result apart."""
    nodes = list(graph.nodes)
    found = set()
    for cut in cuts:
        while cut < len(nodes) and nodes[cut].target is operator.getitem:
            cut += 1
        found.add(cut)
    return found
