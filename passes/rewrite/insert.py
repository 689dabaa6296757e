"""Insert the nodes of the plan into both graphs.

    before    forward                              backward
                relu = ...; view = view(relu)        relu, view = placeholders
                mm = mm(relu, w)                     ...
                return (mm, relu, view)              use(relu); use(view)

    after     forward                              backward
                relu = ...; view = view(relu)        handle, other = placeholders
                handle = store(relu)                 x = load(handle, size, stride, ...)
                other = stand_in(size of view)
                mm = mm(relu, w)                     ...
                wait_store_(handle, relu)            wait_load_(x, handle)
                return (mm, handle, other)           use(x); use(as_strided(x, ...))

The handle is saved instead of the first member of a group, a stand-in instead of each other member. So autograd and
its hooks see the same list of shapes, dtypes and devices as without us. Each node has its planned position as an
argument, so that the trace of a run can be compared with the plan.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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
    """A node to insert before the node at `position` of the original graph; `rank` orders those at one position."""

    position: int
    rank: int
    group: AliasGroup
    build: Callable[[AliasGroup, int], None]


def insert(partition: Partition, plan: Plan, *, config: str) -> None:
    """Rewrite both graphs. `config` is the runtime's configuration as JSON, an argument of the nodes."""
    forward = _ForwardWriter(partition, plan, config)
    backward = _BackwardWriter(partition, plan)
    forward.write()
    backward.write(forward.replacements)
    partition.recompile()


def refuse_stand_ins(partition: Partition) -> None:
    """Let the backward begin with a node that raises an error if a kept activation is a stand-in.

    Hazard: a checkpoint may run the forward again as another graph, whose stand-ins then reach this backward. Without
    the node it would compute with them.
    """
    graph = partition.backward.graph
    placeholders = partition.bwd_placeholders
    received = [placeholders[n.name] for n in partition.saved if _is_kept(n, partition) and n.name in placeholders]
    read = [placeholder for placeholder in received if placeholder.users]
    if not read:
        return
    with graph.inserting_before(_first_compute(list(graph.nodes))):
        graph.call_function(ops.refuse_stand_ins.default, (read,)).meta["val"] = None
    partition.recompile()


def _is_kept(node: fx.Node, partition: Partition) -> bool:
    """Whether a saved node is a kept activation: no handle or stand-in of ours, no parameter and no buffer.

    A result of a nested region does not count: it may be a handle, which the region's forward saves for its backward.
    """
    if tensor_of(node) is None or node.target in (ops.store.default, ops.stand_in.default):
        return False
    if node.op == "placeholder":
        return node.name in partition.activations
    made_by = node.args[0] if node.target is operator.getitem else node
    return not isinstance(made_by, fx.Node) or made_by.target is not torch.ops.higher_order.invoke_subgraph


class _ForwardWriter:
    """Inserts `begin_`, the stores with their stand-ins, and the releases.

    `nodes` and `by_name` are those of the graph as it was. By slot: `stored`, the node that is written, and `handles`.
    `replacements`: by name of a member, the node that is saved instead of it.
    """

    def __init__(self, partition: Partition, plan: Plan, config: str) -> None:
        self.partition = partition
        self.plan = plan
        self.config = config
        self.graph = partition.forward.graph
        self.nodes = list(self.graph.nodes)
        self.by_name = {n.name: n for n in self.nodes}
        self.stored: dict[int, fx.Node] = {}
        self.handles: dict[int, fx.Node] = {}
        self.replacements: dict[str, fx.Node] = {}
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
            # Here and not at the stores: a size may be read off an input, which could be released by then.
            self.sizes.prepare(i for g in self.plan.offloaded for shape in self._named_shapes(g) for i in shape)
            args = (token, self.config, self.plan.graph, *totals)
            begin = self.graph.call_function(ops.begin_.default, args)
            begin.meta["val"] = None

    def _store(self, group: AliasGroup, seq: int) -> None:
        stored = rebuild.packed(self.graph, self.by_name[group.base], group)
        self.stored[group.slot] = stored
        saved = [self.by_name[m.name].meta["val"] for m in group.members]
        optional = self._optional(group, stored.meta["val"], saved[0])
        args: tuple[Argument, ...] = (stored, self.config, self.plan.graph, group.slot, seq, *optional)
        name = handle_name(group)
        self.handles[group.slot] = self._save_instead(group.members[0], ops.store.default, args, name)
        for k in range(1, len(saved)):
            args = (self.sizes.of(saved[k].shape), saved[k].dtype, saved[k].device)
            self._save_instead(group.members[k], ops.stand_in.default, args, f"{name}_{k}")

    def _named_shapes(self, group: AliasGroup) -> list[torch.Size]:
        """The shapes that the store of a group, and the stand-ins of its members, have as arguments."""
        base = self.by_name[group.base].meta["val"]
        first, *others = [self.by_name[m.name].meta["val"] for m in group.members]
        is_base = group.pack is None and first.dtype == base.dtype and _same(first.shape, base.shape)
        return [val.shape for val in (others if is_base else [first, *others])]

    def _optional(self, group: AliasGroup, stored: torch.Tensor, first: torch.Tensor) -> list[Any]:
        """The optional arguments of a store, up to the last that is no default; `first`: the first member."""
        decision = self.plan.decisions[group.slot]
        assert isinstance(decision, Offload)
        if stored.dtype != first.dtype or not _same(stored.shape, first.shape):
            return [decision.tier, decision.binding, self.sizes.of(first.shape), first.dtype]
        if decision.binding:
            return [decision.tier, True]
        return [decision.tier] if decision.tier else []

    def _save_instead(
        self, member: Member, target: torch._ops.OpOverload, args: tuple[Argument, ...], name: str
    ) -> fx.Node:
        """The node that is saved instead of a member; it has the member's shape, dtype and device."""
        node = self.graph.create_node("call_function", target, args, name=name)
        saved = self.by_name[member.name]
        node.meta["val"] = _stand_in(self.fake_mode, saved.meta["val"])
        if NOT_CHECKED in saved.meta:
            node.meta[NOT_CHECKED] = saved.meta[NOT_CHECKED]
        self.replacements[member.name] = node
        return node

    def _release(self, group: AliasGroup, seq: int) -> None:
        block = self.plan.points[group.slot].block
        hand_over = True  # the lowering makes it False where the generated code cannot drop its reference
        args = (self.handles[group.slot], self.stored[group.slot], seq, hand_over, block)
        node = self.graph.call_function(ops.wait_store_.default, args)
        node.meta["val"] = None

    def _replace_outputs(self) -> None:
        output = self.partition.fwd_output
        cut = self.partition.num_fwd_outputs
        outputs = list(output.args[0])  # type: ignore[arg-type]
        saved = (self.replacements.get(getattr(n, "name", ""), n) for n in outputs[cut:])
        output.args = ((*outputs[:cut], *saved),)
        for group in self.plan.offloaded:
            self._erase_dead_views(group)

    def _erase_dead_views(self, group: AliasGroup) -> None:
        """Erase what was made of one tensor only to be saved, mostly views. The base stays: its store reads it.

        Hazard: such a view may stand after the release, which must be the last to read the storage.
        """
        for member in group.members:
            node = self.by_name[member.name]
            while not node.users and len(node.all_input_nodes) == 1:
                source = node.all_input_nodes[0]
                self.graph.erase_node(node)
                node = source


class _BackwardWriter:
    """Inserts the loads and the waits, and rebuilds the members from what is loaded.

    `nodes`, `position` and `placeholders` are those of the graph as it was; `forward`: the nodes of the forward, by
    name. By slot: `handles`, the placeholders, and `loads`.
    """

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

    def write(self, replacements: dict[str, fx.Node]) -> None:
        for group in self.plan.offloaded:
            received = [self._receive(member, replacements[member.name].name) for member in group.members]
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
        for group in self.plan.offloaded:  # last: it moves views, before which others of our nodes were to stand
            self._copy_again(group)
        for group in self.plan.offloaded:
            for member in group.members:
                self.graph.erase_node(self.placeholders[member.name])

    def _receive(self, member: Member, name: str) -> fx.Node:
        """A placeholder of that name right before the member's, for what the forward saves instead of the member."""
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
        with self.fake_mode:  # equal to what the operator returns, in a third of the time
            load.meta["val"] = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)

    def _wait(self, group: AliasGroup, seq: int) -> None:
        loaded = self.loads[group.slot]
        layout = group.layout
        assert layout is not None
        node = self.graph.call_function(ops.wait_load_.default, (loaded, self.handles[group.slot], seq))
        node.meta["val"] = None
        for member in group.members:
            if member.copy is None:
                self._replace(member, loaded, layout, self.plan.points[group.slot].wait_before)

    def _copy_again(self, group: AliasGroup) -> None:
        """Make each copy of the group right before it is first needed, and rebuild its members from it."""
        layout = group.layout
        assert layout is not None
        made: dict[Copy | None, tuple[fx.Node, Layout]] = {None: (self.loads[group.slot], layout)}
        for copy, position in self._first_reads(group).items():
            target, arguments = copies.again(self.forward[copy.node])
            with self.graph.inserting_before(self.nodes[position]):
                source = rebuild.member(self.graph, *made[copy.of], copy.source, self.sizes)
                node = rebuild.call(self.graph, target, source, **arguments)
                made[copy] = node, Layout.of(node.meta["val"])
                for member in group.members:
                    if member.copy == copy:
                        self._replace(member, *made[copy], position)

    def _first_reads(self, group: AliasGroup) -> dict[Copy, int]:
        """For each copy of the group, the position where a member of it, or of a copy of it, is first read.

        A copy comes after the copy that it is made of.
        """
        found: dict[Copy, int] = {}
        for member in group.members:
            if member.copy is None:
                continue
            first = first_read(self.placeholders[member.name], self.position)
            for copy in member.copy.chain:
                found[copy] = min(first, found.get(copy, first))
        return found

    def _replace(self, member: Member, source: fx.Node, held: Layout, position: int) -> None:
        """Rebuild a member from `source` before the node at `position`, and replace its placeholder by it.

        Views of the member that stand earlier move after it: their bytes are not there yet. Nothing before `position`
        reads them, so only views (whose other inputs are symbolic sizes) can stand there.
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
    """The bytes of the groups; symbolic where their sizes are."""
    return sum(g.layout.numel * g.layout.dtype.itemsize if g.layout and g.is_hint else g.nbytes for g in groups)


def _layouts(group: AliasGroup) -> list[Layout]:
    assert group.layout is not None
    return [group.layout, *(m.layout for m in group.members)]


def _relies_on(group: AliasGroup) -> str:
    """What the nodes that rebuild the members rely on; `runtime/layout.py` has the values."""
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
    """Build the nodes in planned order, and number them.

    At one position loads precede waits, and stores precede releases; nodes of equal rank are in the order of slots.
    """
    for seq, item in enumerate(sorted(todo, key=lambda i: (i.position, i.rank, i.group.slot))):
        with graph.inserting_before(nodes[item.position]):
            item.build(item.group, seq)


def _first_compute(nodes: list[fx.Node]) -> fx.Node:
    return next(n for n in nodes if n.op != "placeholder")


def _stand_in(mode: FakeTensorMode, saved: torch.Tensor) -> torch.Tensor:
    """The FakeTensor of what is saved instead of `saved`."""
    with mode:
        made: torch.Tensor = ops.stand_in(saved.shape, saved.dtype, saved.device)
    return made


def _same(a: Iterable[int | torch.SymInt], b: Iterable[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal for certain; asking adds no guard."""
    first = list(a)
    second = list(b)
    return len(first) == len(second) and all(map(statically_equal, first, second))
