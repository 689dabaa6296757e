"""The backward's nodes: the loads, the waits, and what rebuilds the members. `insert.py` has the picture."""

from __future__ import annotations

import torch
from torch import fx

from ssd_fx.passes.alias import copies
from ssd_fx.passes.cost.lifetime import first_read, view_closure
from ssd_fx.passes.groups import AliasGroup, Copy, Layout, Member
from ssd_fx.passes.partition import Partition, storage_key
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.rewrite import rebuild
from ssd_fx.passes.schedule import LOAD, Event

ops = torch.ops.ssd_fx


class BackwardWriter:
    """Inserts the loads and the waits, and rebuilds the members from the loaded tensors.

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
        with self.graph.inserting_before(rebuild.first_compute(self.nodes)):
            self.sizes = rebuild.Sizes(self.graph)
            layouts = [x for g in self.plan.offloaded for x in (g.stored, *(m.layout for m in g.members))]
            self.sizes.prepare(i for layout in layouts for i in layout.numbers)
        groups = {group.slot: group for group in self.plan.offloaded}
        for seq, event in enumerate(self.plan.schedule.backward):
            build = self._load if event.kind is LOAD else self._wait
            with self.graph.inserting_before(self.nodes[event.at - len(self.forward)]):
                build(groups[event.slot], event, seq)
        for group in self.plan.offloaded:  # last: it moves views, and others of our nodes may stand before these
            self._copy_again(group)
        for group in self.plan.offloaded:
            for member in group.members:
                self.graph.erase_node(self.placeholders[member.name])

    def _receive(self, member: Member, name: str) -> fx.Node:
        """A placeholder `name` right before the member's, for the tensor that is saved instead of the member."""
        saved = self.placeholders[member.name]
        with self.graph.inserting_before(saved):
            node = self.graph.create_node("placeholder", name, name=name)
        # Inductor has numbered the regions between mutations. If the first node has no number, it does so again, and
        # then merges no product with an addition behind a wait.
        node.meta = {name: saved.meta[name] for name in ("desc", "mutation_region_id") if name in saved.meta}
        node.meta["val"] = rebuild.stand_in(self.fake_mode, saved.meta["val"])
        return node

    def _load(self, group: AliasGroup, event: Event, seq: int) -> None:
        layout = group.stored
        where = (self.sizes.of(layout.size), self.sizes.of(layout.stride), layout.dtype, layout.device)
        no_default = () if may_be_donated(group, self.forward[group.base]) else (False,)
        args = (self.handles[group.slot], *where, seq, event.flag, _relies_on(group), *no_default)
        self.loads[group.slot] = load = self.graph.call_function(ops.load.default, args)
        with self.fake_mode:  # equal to the operator's result, in a third of the time
            load.meta["val"] = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)

    def _wait(self, group: AliasGroup, event: Event, seq: int) -> None:
        loaded = self.loads[group.slot]
        node = self.graph.call_function(ops.wait_load_.default, (loaded, self.handles[group.slot], seq))
        node.meta["val"] = None
        for member in group.members:
            if member.copy is None:
                self._replace(member, loaded, group.stored, event.at - len(self.forward))

    def _copy_again(self, group: AliasGroup) -> None:
        """Make each copy of the group right before it is first needed, and rebuild its members from it."""
        made: dict[Copy | None, tuple[fx.Node, Layout]] = {None: (self.loads[group.slot], group.stored)}
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


def may_be_donated(group: AliasGroup, base: fx.Node) -> bool:
    """Whether the load of a group may return the stored tensor itself, so that the backward may write into it.

    Hazard: the caller may have given an input of the graph to another stream, and dropped it. `record_stream` keeps the
    allocator off its memory until that stream has read it, but does not keep the backward off. `base`: the group's
    forward node.
    """
    return base.op != "placeholder" or group.stored.device.type == "cpu"


def _relies_on(group: AliasGroup) -> str:
    """The part of a layout that the nodes which rebuild the members rely on; `runtime/layout.py` has the values."""
    stored = group.stored
    sources = [m.copy.chain[0].source if m.copy else m.layout for m in group.members]
    if any(source.dtype != stored.dtype for source in sources):
        return "dtype"
    rebuilt = any(m.copy for m in group.members)  # a copy takes its strides from what it copies
    return "strides" if rebuilt or not all(rebuild.same_view(stored, s) for s in sources) else ""
