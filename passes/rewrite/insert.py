"""The nodes of the plan, put into both graphs.

    forward                                        backward
      relu = ...; view = view(relu)                  handle, other = placeholders
      handle = store(relu)                           x = load(handle, size, stride, ...)
      other = stand_in(size of view)
      mm = mm(relu, w)                               ...
      wait_store_(handle, relu)                      wait_load_(x, handle)
      return (mm, handle, other)                     view = as_strided(x, ...); use(view)

The handle takes the place of the first member of a group among the saved tensors, a stand-in that of each other one:
autograd, and whoever looks at what it saves, sees the shapes, dtypes and devices that it would see without us. Our
nodes in planned order carry their place there, so that the trace of a run can be compared with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.node import Argument

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.alias import copies
from ssd_fx.passes.alias.packing import statically_equal
from ssd_fx.passes.cost.lifetime import first_read, view_closure
from ssd_fx.passes.groups import AliasGroup, Copy, Layout, Member
from ssd_fx.passes.partition import NOT_CHECKED, Partition, storage_key, tensor_of
from ssd_fx.passes.plan import Offload, Plan
from ssd_fx.passes.rewrite import rebuild

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


def insert(partition: Partition, plan: Plan, *, config: str) -> None:
    """Rewrite both graphs. `config` is the runtime's configuration as JSON and travels in the nodes."""
    forward = _ForwardWriter(partition, plan, config)
    backward = _BackwardWriter(partition, plan)
    forward.write()
    backward.write(forward.in_place)
    partition.recompile()


def refuse_stand_ins(partition: Partition) -> None:
    """The backward begins with a look at the activations that its graph keeps, so that it never takes the stand-in of
    another graph for data. A checkpoint can bring one there, whose forward runs again as another graph."""
    graph, placeholders = partition.backward.graph, partition.bwd_placeholders
    ours = (ops.store.default, ops.stand_in.default)
    inputs = partition.forward.graph.find_nodes(op="placeholder")
    not_looked_at = {n for n in inputs if n.name not in partition.activations}
    saved = [n for n in partition.saved if n.target not in ours and tensor_of(n) is not None]
    names = [n.name for n in saved if n not in not_looked_at and not _is_of_a_region(n)]
    kept = [p for name in names if (p := placeholders.get(name)) is not None and p.users]
    if not kept:
        return
    with graph.inserting_before(_first_compute(list(graph.nodes))):
        graph.call_function(ops.refuse_stand_ins.default, (kept,)).meta["val"] = None
    partition.recompile()


def _is_of_a_region(node: fx.Node) -> bool:
    """Whether a nested region returned it: what its forward saves for its own backward may be a handle of its graph."""
    made_by = node.args[0] if node.target is operator.getitem else node
    return isinstance(made_by, fx.Node) and made_by.target is torch.ops.higher_order.invoke_subgraph


class _ForwardWriter:
    def __init__(self, partition: Partition, plan: Plan, config: str) -> None:
        self.partition, self.plan, self.config = partition, plan, config
        self.graph = partition.forward.graph
        self.nodes = list(self.graph.nodes)
        self.base = {n.name: n for n in self.nodes}
        self.stored: dict[int, fx.Node] = {}
        self.handles: dict[int, fx.Node] = {}
        self.in_place: dict[str, fx.Node] = {}  # by member: what takes its place
        self.fake_mode = rebuild.fake_mode(self.graph)
        self.sizes = rebuild.Sizes(self.graph)

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
            device = next((g.layout.device for g in self.plan.offloaded if g.layout), torch.device("cpu"))
            token = rebuild.call(self.graph, aten.empty.memory_format, [0], dtype=torch.int64, device=device)
            totals = self.sizes.all(_nbytes(self.plan.groups), _nbytes(self.plan.offloaded))
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
        saved = [self.base[m.name].meta["val"] for m in group.members]
        sizes, val = self._sizes(group), stored.meta["val"]
        alike = val.dtype == saved[0].dtype and _same(val.shape, saved[0].shape)
        optional = [decision.tier, decision.binding, *([] if alike else [sizes[0], saved[0].dtype])]
        while optional and not optional[-1]:  # defaults are left out
            optional.pop()
        arguments: tuple[Argument, ...] = (stored, self.config, self.plan.graph, group.slot, seq, *optional)
        handle = self._saved_instead(group.members[0], ops.store.default, arguments, handle_name(group))
        for k, (member, val, size) in enumerate(zip(group.members[1:], saved[1:], sizes[1:], strict=True), 1):
            arguments = (size, val.dtype, val.device)
            self._saved_instead(member, ops.stand_in.default, arguments, f"{handle_name(group)}_{k}")
        self.handles[group.slot] = handle

    def _saved_instead(
        self, member: Member, target: torch._ops.OpOverload, args: tuple[Argument, ...], name: str
    ) -> fx.Node:
        """The node that is saved instead of a member, which looks like it."""
        node = self.graph.create_node("call_function", target, args, name=name)
        saved = self.base[member.name]
        node.meta["val"] = _stand_in(self.fake_mode, saved.meta["val"])
        if NOT_CHECKED in saved.meta:  # how autograd saves a tensor: with a version check or without
            node.meta[NOT_CHECKED] = saved.meta[NOT_CHECKED]
        self.in_place[member.name] = node
        return node

    def _sizes(self, group: AliasGroup) -> list[list[fx.Node | int]]:
        """The sizes of the members, as arguments of nodes."""
        shapes = [self.base[m.name].meta["val"].shape for m in group.members]
        self.sizes.prepare(i for shape in shapes for i in shape)
        return [self.sizes.of(shape) for shape in shapes]

    def _release(self, group: AliasGroup, seq: int) -> None:
        block = self.plan.points[group.slot].block
        hand_over = True  # whoever runs the graph drops its reference; where it cannot, the lowering says so
        args = (self.handles[group.slot], self.stored[group.slot], seq, hand_over, block)
        node = self.graph.call_function(ops.wait_store_.default, args)
        node.meta["val"] = None

    def _replace_outputs(self) -> None:
        output, cut = self.partition.fwd_output, self.partition.num_fwd_outputs
        outputs = list(output.args[0])  # type: ignore[arg-type]
        saved = (self.in_place.get(getattr(n, "name", ""), n) for n in outputs[cut:])
        output.args = ((*outputs[:cut], *saved),)
        for group in self.plan.offloaded:
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


class _BackwardWriter:
    def __init__(self, partition: Partition, plan: Plan) -> None:
        self.plan = plan
        self.graph = partition.backward.graph
        self.nodes = list(self.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.placeholders = partition.bwd_placeholders
        self.forward = {n.name: n for n in partition.forward.graph.nodes}
        self.handles: dict[int, fx.Node] = {}
        self.loads: dict[int, fx.Node] = {}
        self.fake_mode = rebuild.fake_mode(self.graph)

    def write(self, in_place: dict[str, fx.Node]) -> None:
        for group in self.plan.offloaded:
            received = [self._receive(member, in_place[member.name].name) for member in group.members]
            self.handles[group.slot] = received[0]
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

    def _receive(self, member: Member, name: str) -> fx.Node:
        """A placeholder in the place of the member's, for what takes its place in the forward under that name."""
        saved = self.placeholders[member.name]
        with self.graph.inserting_before(saved):
            node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = _stand_in(self.fake_mode, saved.meta["val"])
        if "desc" in saved.meta:
            node.meta["desc"] = saved.meta["desc"]
        return node

    def _load(self, group: AliasGroup, seq: int) -> None:
        layout = group.layout
        assert layout is not None
        where = (self.sizes.of(layout.size), self.sizes.of(layout.stride), layout.dtype, layout.device)
        strict = self.plan.points[group.slot].strict
        args = (self.handles[group.slot], *where, seq, strict, _relies_on(group))
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


def _relies_on(group: AliasGroup) -> str:
    """What the nodes that rebuild the members rely on (`runtime/layout.py`)."""
    stored = group.layout
    assert stored is not None
    sources = [m.copy.chain[0].source if m.copy else m.layout for m in group.members]
    if any(source.dtype != stored.dtype for source in sources):
        return "dtype"
    rebuilt = any(m.copy for m in group.members)  # a copy takes its strides from what it copies
    return "strides" if rebuilt or not all(rebuild.same_view(stored, s) for s in sources) else ""


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


def _stand_in(mode: FakeTensorMode, saved: torch.Tensor) -> torch.Tensor:
    with mode:
        made: torch.Tensor = ops.stand_in(saved.shape, saved.dtype, saved.device)
    return made


def _same(a: Iterable[int | torch.SymInt], b: Iterable[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal for certain; asking adds no guard."""
    sizes = tuple(a), tuple(b)
    return len(sizes[0]) == len(sizes[1]) and all(map(statically_equal, *sizes))
