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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch._dynamo.utils import detect_fake_mode
from torch._subclasses import FakeTensorMode

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.lifetime import view_closure
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import AliasGroup, Layout, Member, Plan

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
        self.handles: dict[int, fx.Node] = {}
        self.fake_mode = _fake_mode(self.nodes)

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
            totals = (self.plan.saved_bytes, self.plan.offloaded_bytes)
            args = (token, self.config, self.plan.graph, *totals, self._positions())
            begin = self.graph.call_function(ops.begin_.default, args)
            begin.meta["val"] = None

    def _positions(self) -> str:
        """Where begin_ and, in planned order, our nodes stand in both graphs: with it a trace becomes a profile."""
        points = [(group.slot, self.plan.points[group.slot]) for group in self.plan.offloaded]
        forward = [(p.store_after + 1, 0, slot) for slot, p in points]
        forward += [(p.release_after + 1, 1, slot) for slot, p in points]
        backward = [(p.load_before, 0, slot) for slot, p in points]
        backward += [(p.wait_before, 1, slot) for slot, p in points]
        first = self.nodes.index(_first_compute(self.nodes))
        halves = [first, *(at for at, _, _ in sorted(forward))], [at for at, _, _ in sorted(backward)]
        return "|".join(",".join(map(str, half)) for half in halves)

    def _store(self, group: AliasGroup, seq: int) -> None:
        args = (self.base[group.base], self.config, self.plan.graph, group.slot, seq)
        handle = self.graph.create_node("call_function", ops.store.default, args, {}, name=handle_name(group))
        handle.meta["val"] = _fake(self.fake_mode, ())
        self.handles[group.slot] = handle

    def _release(self, group: AliasGroup, seq: int) -> None:
        block = self.plan.points[group.slot].block
        args = (self.handles[group.slot], self.base[group.base], seq, self.hand_over, block)
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
        """Views that were made to be saved are read by nobody now, and stand behind the release at times."""
        for member in group.members:
            node = self.base[member.name]
            while not node.users and len(node.all_input_nodes) == 1:
                source = node.all_input_nodes[0]
                self.graph.erase_node(node)
                node = source

    def _inherit_saved_meta(self, group: AliasGroup) -> None:
        """How autograd saves a tensor (with a version check or without) stands at its node: the handle inherits it."""
        key = "saved_tensor_with_no_vc_check"
        if key in self.base[group.members[0].name].meta:
            self.handles[group.slot].meta[key] = self.base[group.members[0].name].meta[key]


class _BackwardWriter:
    def __init__(self, partition: Partition, plan: Plan, consume: bool) -> None:
        self.plan, self.consume = plan, consume
        self.graph = partition.backward.graph
        self.nodes = list(self.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.placeholders = partition.bwd_placeholders
        self.handles: dict[int, fx.Node] = {}
        self.loads: dict[int, fx.Node] = {}
        self.fake_mode = _fake_mode(self.nodes)

    def write(self, forward_handles: dict[int, fx.Node]) -> None:
        for group in self.plan.offloaded:
            self._add_handle(group, forward_handles[group.slot].name)
        todo = []
        for group in self.plan.offloaded:
            points = self.plan.points[group.slot]
            todo.append(_Insertion(points.load_before, 0, group, self._load))
            todo.append(_Insertion(points.wait_before, 1, group, self._wait))
        _run(self.graph, self.nodes, todo)
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
        args = (self.handles[group.slot], list(layout.size), list(layout.stride), layout.dtype, layout.device, seq)
        strict = self.plan.points[group.slot].strict
        node = self.graph.call_function(ops.load.default, (*args, self.consume, strict))
        # The storage of the saved tensors' FakeTensors, so that whoever asks what aliases what in the backward is
        # told the truth.
        saved = self.placeholders[group.members[0].name].meta["val"]
        with self.fake_mode:
            node.meta["val"] = torch.as_strided(saved, layout.size, layout.stride, layout.offset)
        self.loads[group.slot] = node

    def _wait(self, group: AliasGroup, seq: int) -> None:
        loaded = self.loads[group.slot]
        node = self.graph.call_function(ops.wait_load_.default, (loaded, self.handles[group.slot], seq))
        node.meta["val"] = None
        assert group.layout is not None
        after = node
        for member in group.members:
            placeholder = self.placeholders[member.name]
            views = [v for v in view_closure(placeholder) if v is not placeholder]
            tensor, after = self._replay(loaded, group.layout, member, after)
            placeholder.replace_all_uses_with(tensor)
            after = self._pull_behind(after, views, self.plan.points[group.slot].wait_before)

    def _replay(self, loaded: fx.Node, base: Layout, member: Member, after: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The member as a view of the loaded base."""
        layout = member.layout
        if (layout.size, layout.stride, layout.offset) == (base.size, base.stride, base.offset):
            return loaded, after
        with self.graph.inserting_after(after):
            args = (loaded, list(layout.size), list(layout.stride), layout.offset)
            view = self.graph.call_function(aten.as_strided.default, args)
        with self.fake_mode:
            view.meta["val"] = torch.as_strided(loaded.meta["val"], layout.size, layout.stride, layout.offset)
        return view, view

    def _pull_behind(self, after: fx.Node, views: list[fx.Node], wait_before: int) -> fx.Node:
        """Move the views that stand before the wait behind it: they would otherwise look at bytes that are not there
        yet.

        The first read comes after the wait, so only views (whose other inputs are symbolic sizes) can stand before it.
        """
        for view in sorted(views, key=self.position.__getitem__):
            if self.position[view] < wait_before:
                after.append(view)
                after = view
        return after


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


def _fake_mode(nodes: list[fx.Node]) -> FakeTensorMode:
    mode = detect_fake_mode([n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)])
    assert mode is not None, "a partitioned graph has FakeTensors"
    return mode


def _fake(mode: FakeTensorMode, size: tuple[int, ...]) -> torch.Tensor:
    with mode:
        return torch.empty(size, dtype=torch.int64, device=_CPU)
