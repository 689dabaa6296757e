"""The nodes of the plan, put into both graphs.

    forward                                        backward
      relu = ...                                     handle = placeholder
      handle = store(relu)                           x = load(handle, size, stride, ...)
      mm = mm(relu, w)                               ...
      wait_store_(handle, relu)                      wait_load_(x, handle)
      return (mm, handle)                            relu = as_strided(x, ...); use(relu)

One handle takes the place of all members of a group among the saved tensors. Every node carries its place in the
planned order, so that the trace of a run can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes import copies, rebuild
from ssd_fx.passes.groups import AliasGroup, Copy, Layout, Member
from ssd_fx.passes.lifetime import first_read, view_closure
from ssd_fx.passes.partition import NOT_CHECKED, Partition, storage_key
from ssd_fx.passes.plan import Offload, Plan

ops = torch.ops.ssd_fx
aten = torch.ops.aten


@dataclass(frozen=True)
class _Insertion:
    """One node to come: it goes before the node at `position` of its graph as it was; `rank` orders those at one
    position."""

    position: int
    rank: int
    group: AliasGroup
    build: Callable[[AliasGroup, int], None]


def insert(partition: Partition, plan: Plan, *, config: str, hand_over: bool, consume: bool) -> None:
    """Rewrite both graphs. `config` is the runtime's configuration as JSON and travels in the nodes.

    `hand_over` and `consume` are the arguments of `wait_store_` and `load` (docs/design.md): whether whoever runs the
    forward drops its references in time by itself, and whether the backward runs at most once.
    """
    forward = _ForwardWriter(partition, plan, config, hand_over)
    backward = _BackwardWriter(partition, plan, consume)
    forward.write()
    backward.write(forward.handles)
    partition.recompile()


class _ForwardWriter:
    def __init__(self, partition: Partition, plan: Plan, config: str, hand_over: bool) -> None:
        self.partition, self.plan, self.config, self.hand_over = partition, plan, config, hand_over
        self.graph = partition.forward.graph
        self.nodes = list(self.graph.nodes)
        self.base = {n.name: n for n in self.nodes}
        self.stored: dict[int, fx.Node] = {}
        self.handles: dict[int, fx.Node] = {}
        self.fake_mode = rebuild.fake_mode(self.graph)

    def write(self) -> None:
        self._begin()
        todo = []
        for group in self.plan.offloaded:
            points = self.plan.points[group.slot]
            todo.append(_Insertion(points.store_after + 1, 0, group, self._store))
            todo.append(_Insertion(points.release_after + 1, 1, group, self._release))
        _run(self.graph, self.nodes, todo)
        self._replace_outputs()

    def _begin(self) -> None:
        with self.graph.inserting_before(_first_compute(self.nodes)):
            token = self.graph.call_function(aten.empty.memory_format, ([0],), {"dtype": torch.int64, "device": _CPU})
            token.meta["val"] = _fake(self.fake_mode, (0,))
            totals = rebuild.Sizes(self.graph).all(_nbytes(self.plan.groups), _nbytes(self.plan.offloaded))
            args = (token, self.config, self.plan.graph, *totals, self._positions())
            begin = self.graph.call_function(ops.begin_.default, args)
            begin.meta["val"] = None

    def _positions(self) -> str:
        """Where begin_ and, in planned order, our nodes stand in both graphs, and the roofline's ms between the
        first and the last of them: with it a trace becomes a profile."""
        points = [(group.slot, self.plan.points[group.slot]) for group in self.plan.offloaded]
        forward = [(p.store_after + 1, 0, slot) for slot, p in points]
        forward += [(p.release_after + 1, 1, slot) for slot, p in points]
        backward = [(p.load_before, 0, slot) for slot, p in points]
        backward += [(p.wait_before, 1, slot) for slot, p in points]
        first = self.nodes.index(_first_compute(self.nodes))
        halves = [first, *(at for at, _, _ in sorted(forward))], [at for at, _, _ in sorted(backward)]
        timeline = self.plan.timeline
        assert timeline is not None
        spans = zip(halves, (timeline.forward, timeline.backward), strict=True)
        roofline_ms = sum(starts[half[-1]] - starts[half[0]] for half, starts in spans if half) / timeline.scale
        return "|".join([*(",".join(map(str, half)) for half in halves), f"{roofline_ms:.4g}"])

    def _store(self, group: AliasGroup, seq: int) -> None:
        stored = rebuild.packed(self.graph, self.base[group.base], group)
        self.stored[group.slot] = stored
        decision = self.plan.decisions[group.slot]
        assert isinstance(decision, Offload)
        defaults: tuple[str | bool, ...] = (decision.tier, decision.binding)
        while defaults and not defaults[-1]:  # are left out
            defaults = defaults[:-1]
        args = (stored, self.config, self.plan.graph, group.slot, seq, *defaults)
        handle = self.graph.create_node("call_function", ops.store.default, args, {}, name=handle_name(group))
        handle.meta["val"] = _fake(self.fake_mode, ())
        self.handles[group.slot] = handle

    def _release(self, group: AliasGroup, seq: int) -> None:
        block = self.plan.points[group.slot].block
        args = (self.handles[group.slot], self.stored[group.slot], seq, self.hand_over, block)
        node = self.graph.call_function(ops.wait_store_.default, args)
        node.meta["val"] = None

    def _replace_outputs(self) -> None:
        """The first member of every group becomes the handle, the others go."""
        first = {g.members[0].name: self.handles[g.slot] for g in self.plan.offloaded}
        gone = {m.name for g in self.plan.offloaded for m in g.members[1:]}
        output, cut = self.partition.fwd_output, self.partition.num_fwd_outputs
        outputs, descs = list(output.args[0]), output.meta.get("desc")  # type: ignore[arg-type]
        keep = [i for i, n in enumerate(outputs) if i < cut or not isinstance(n, fx.Node) or n.name not in gone]
        replaced = [outputs[i] if i < cut else first.get(getattr(outputs[i], "name", ""), outputs[i]) for i in keep]
        output.args = (tuple(replaced),)
        if descs is not None:
            output.meta["desc"] = type(descs)(descs[i] for i in keep)
        for group in self.plan.offloaded:
            self._inherit_saved_meta(group)
            self._erase_dead_views(group)

    def _erase_dead_views(self, group: AliasGroup) -> None:
        """What was made of one tensor only to be saved, views mostly, is read by nobody now, and stands behind the
        release at times. Never the base, which its store reads."""
        for member in group.members:
            node = self.base[member.name]
            while not node.users and len(node.all_input_nodes) == 1:
                source = node.all_input_nodes[0]
                self.graph.erase_node(node)
                node = source

    def _inherit_saved_meta(self, group: AliasGroup) -> None:
        """How autograd saves a tensor (with a version check or without) stands at its node: the handle inherits it."""
        saved, handle = self.base[group.members[0].name], self.handles[group.slot]
        if NOT_CHECKED in saved.meta:
            handle.meta[NOT_CHECKED] = saved.meta[NOT_CHECKED]


class _BackwardWriter:
    def __init__(self, partition: Partition, plan: Plan, consume: bool) -> None:
        self.plan, self.consume = plan, consume
        self.graph = partition.backward.graph
        self.nodes = list(self.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.placeholders = partition.bwd_placeholders
        self.forward = {n.name: n for n in partition.forward.graph.nodes}
        self.handles: dict[int, fx.Node] = {}
        self.loads: dict[int, fx.Node] = {}
        self.fake_mode = rebuild.fake_mode(self.graph)

    def write(self, forward_handles: dict[int, fx.Node]) -> None:
        for group in self.plan.offloaded:
            self._add_handle(group, forward_handles[group.slot].name)
        with self.graph.inserting_before(_first_compute(self.nodes)):
            self.sizes = rebuild.Sizes(self.graph)
            self.sizes.prepare(i for g in self.plan.offloaded for layout in _layouts(g) for i in layout.numbers)
        todo = []
        for group in self.plan.offloaded:
            points = self.plan.points[group.slot]
            todo.append(_Insertion(points.load_before, 0, group, self._load))
            todo.append(_Insertion(points.wait_before, 1, group, self._wait))
        _run(self.graph, self.nodes, todo)
        for group in self.plan.offloaded:  # last: it moves views from where other nodes of ours were to go
            self._copy_again(group)
        for group in self.plan.offloaded:
            for member in group.members:
                self.graph.erase_node(self.placeholders[member.name])

    def _add_handle(self, group: AliasGroup, name: str) -> None:
        """A placeholder in the place of the group's first member, under the handle's name in the forward."""
        first = self.placeholders[group.members[0].name]
        with self.graph.inserting_before(first):
            handle = self.graph.create_node("placeholder", name, name=name)
        handle.meta["val"] = _fake(self.fake_mode, ())
        if "desc" in first.meta:
            handle.meta["desc"] = first.meta["desc"]
        self.handles[group.slot] = handle

    def _load(self, group: AliasGroup, seq: int) -> None:
        layout = group.layout
        assert layout is not None
        where = (self.sizes.of(layout.size), self.sizes.of(layout.stride), layout.dtype, layout.device)
        strict = self.plan.points[group.slot].strict
        args = (self.handles[group.slot], *where, seq, self.consume, strict)
        self.loads[group.slot] = load = self.graph.call_function(ops.load.default, args)
        with self.fake_mode:  # what the operator would make: to call it takes three times as long
            load.meta["val"] = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)

    def _wait(self, group: AliasGroup, seq: int) -> None:
        loaded, layout = self.loads[group.slot], group.layout
        assert layout is not None
        node = self.graph.call_function(ops.wait_load_.default, (loaded, self.handles[group.slot], seq))
        node.meta["val"] = None
        for member in group.members:
            if member.copy is None:
                self._replace(member, loaded, layout, self.plan.points[group.slot].wait_before)

    def _copy_again(self, group: AliasGroup) -> None:
        """Each copy right before the first of its members is read, or a member of a copy of it."""
        loaded, layout = self.loads[group.slot], group.layout
        assert layout is not None
        members: dict[Copy, list[Member]] = {}
        positions: dict[Copy, int] = {}
        for member in group.members:
            for copy in member.copy.chain if member.copy is not None else ():  # a copy comes behind what it copies
                first = first_read(self.placeholders[member.name], self.position)
                positions[copy] = min(first, positions.get(copy, first))
                members.setdefault(copy, []).extend([member] if copy == member.copy else [])
        made: dict[Copy | None, tuple[fx.Node, Layout]] = {None: (loaded, layout)}
        for copy, position in positions.items():
            target, arguments = copies.again(self.forward[copy.node])
            with self.graph.inserting_before(self.nodes[position]):
                source = rebuild.member(self.graph, *made[copy.of], copy.source, self.sizes)
                node = rebuild.call(self.graph, target, source, **arguments)
                made[copy] = node, Layout.of(node.meta["val"])
                for member in members[copy]:
                    self._replace(member, *made[copy], position)

    def _replace(self, member: Member, source: fx.Node, held: Layout, position: int) -> None:
        """Put the member, rebuilt from `source`, in the place of its placeholder, before the node at `position`.

        Its views that stand earlier move behind it: they would look at bytes that are not there yet. Nothing before
        `position` reads them, so only views (whose other inputs are symbolic sizes) can stand there.
        """
        placeholder = self.placeholders[member.name]
        views = [v for v in view_closure(placeholder) if v is not placeholder and self.position[v] < position]
        rebuilt = rebuild.member(self.graph, source, held, member.layout, self.sizes)
        placeholder.replace_all_uses_with(rebuilt)
        for view in sorted(views, key=self.position.__getitem__):
            self.nodes[position].prepend(view)
        key = storage_key(placeholder.meta["val"])
        assert key is not None
        rebuild.refresh(rebuilt, key, self.fake_mode)


def _nbytes(groups: Iterable[AliasGroup]) -> int | torch.SymInt:
    """Their bytes, in symbols where they have some."""
    return sum(g.layout.numel * g.layout.dtype.itemsize if g.layout and g.is_hint else g.nbytes for g in groups)


def _layouts(group: AliasGroup) -> list[Layout]:
    assert group.layout is not None
    return [group.layout, *(m.layout for m in group.members)]


_CPU = torch.device("cpu")


def handle_name(group: AliasGroup) -> str:
    return f"ssd_fx_handle_{group.slot}"


def _run(graph: fx.Graph, nodes: list[fx.Node], todo: list[_Insertion]) -> None:
    """Build the nodes in planned order, which also numbers them.

    At one position loads precede waits, and stores precede releases; equal ranks keep the order of the plan.
    """
    for seq, item in enumerate(sorted(todo, key=lambda i: (i.position, i.rank, i.group.slot))):
        with graph.inserting_before(nodes[item.position]):
            item.build(item.group, seq)


def _first_compute(nodes: list[fx.Node]) -> fx.Node:
    return next(n for n in nodes if n.op != "placeholder")


def _fake(mode: FakeTensorMode, size: tuple[int, ...]) -> torch.Tensor:
    with mode:
        return torch.empty(size, dtype=torch.int64, device=_CPU)
