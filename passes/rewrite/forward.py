"""The forward's nodes: `begin_`, the stores with their stand-ins, and the releases. `insert.py` has the picture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.node import Argument

from ssd_fx.compat import OpOverload
from ssd_fx.passes.alias.channels import is_laid_out
from ssd_fx.passes.groups import AliasGroup, Member
from ssd_fx.passes.partition import NOT_CHECKED, STORED, Partition
from ssd_fx.passes.plan import Offload, Plan
from ssd_fx.passes.rewrite import rebuild
from ssd_fx.passes.schedule import STORE, Event

ops = torch.ops.ssd_fx
aten = torch.ops.aten


class ForwardWriter:
    """Inserts `begin_`, the stores with their stand-ins, and the releases.

    `nodes` and `by_name` are those of the graph as it was. By slot: `stored`, the node that is written, and `handles`.
    `replacements`: by name of a member, the node that is saved instead of it.
    """

    def __init__(self, partition: Partition, plan: Plan, config: str, about: str) -> None:
        self.partition = partition
        self.plan = plan
        self.config = config
        self.about = about
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
        groups = {group.slot: group for group in self.plan.offloaded}
        for seq, event in enumerate(self.plan.schedule.forward):
            build = self._store if event.kind is STORE else self._release
            with self.graph.inserting_before(self.nodes[event.at + 1]):
                build(groups[event.slot], event, seq)
        self._replace_outputs()

    def _begin(self) -> None:
        with self.graph.inserting_before(rebuild.first_compute(self.nodes)):
            device = next((g.layout.device for g in self.plan.offloaded if g.layout), torch.device("cpu"))
            token = rebuild.call(self.graph, aten.empty.memory_format, [0], dtype=torch.int64, device=device)
            totals = (_nbytes(self.plan.groups), _nbytes(self.plan.offloaded))
            self.sizes.prepare(totals)
            # Here and not at the stores: a size may be read off an input, which could be released by then.
            self.sizes.prepare(i for g in self.plan.offloaded for shape in self._named_shapes(g) for i in shape)
            optional: list[Argument] = [self.about] if self.about else []
            if device.type != "cpu" and (inflight := self.plan.inflight_bytes):  # a host does not run ahead of itself
                optional = [self.about, inflight]
            args = (token, self.config, self.plan.graph, *self.sizes.of(totals), *optional)
            begin = self.graph.call_function(ops.begin_.default, args)
            begin.meta["val"] = None

    def _store(self, group: AliasGroup, event: Event, seq: int) -> None:
        stored = rebuild.packed(self.graph, self.by_name[group.base], group)
        self.stored[group.slot] = stored
        saved = [self.by_name[m.name].meta["val"] for m in group.members]
        optional = self._optional(group, event.flag, stored.meta["val"], saved[0])
        args: tuple[Argument, ...] = (stored, self.config, self.plan.graph, group.slot, seq, *optional)
        name = f"ssd_fx_handle_{group.slot}"
        self.handles[group.slot] = self._save_instead(group.members[0], ops.store.default, args, name)
        for k in range(1, len(saved)):
            args = (self.sizes.of(saved[k].shape), saved[k].dtype, saved[k].device)
            self._save_instead(group.members[k], ops.stand_in.default, args, f"{name}_{k}")

    def _named_shapes(self, group: AliasGroup) -> list[tuple[int, ...]]:
        """The sizes and strides that the store of a group, and the stand-ins of its members, have as arguments."""
        base = self.by_name[group.base]
        saved = [self.by_name[m.name].meta["val"] for m in group.members]
        is_base = group.pack is None and _is_alike(saved[0], base.meta["val"])
        named = saved[1:] if is_base and not is_laid_out(group, base) else saved
        strides = [group.stored.stride] if is_laid_out(group, base) else []
        return [*(val.shape for val in named), *strides]

    def _optional(self, group: AliasGroup, later: bool, stored: torch.Tensor, first: torch.Tensor) -> list[Any]:
        """The optional arguments of a store, up to the last that is no default; `first`: the first member."""
        decision = self.plan.decisions[group.slot]
        assert isinstance(decision, Offload)
        if is_laid_out(group, self.by_name[group.base]):
            shape, stride = self.sizes.of(first.shape), self.sizes.of(group.stored.stride)
            return [decision.tier, decision.binding, later, shape, first.dtype, stride]
        if not _is_alike(stored, first):
            return [decision.tier, decision.binding, later, self.sizes.of(first.shape), first.dtype]
        if later:
            return [decision.tier, decision.binding, True]
        if decision.binding:
            return [decision.tier, True]
        return [decision.tier] if decision.tier else []

    def _save_instead(self, member: Member, target: OpOverload, args: tuple[Argument, ...], name: str) -> fx.Node:
        """The node that is saved instead of a member; it has the member's shape, dtype and device."""
        node = self.graph.create_node("call_function", target, args, name=name)
        saved = self.by_name[member.name]
        node.meta["val"] = rebuild.stand_in(self.fake_mode, saved.meta["val"])
        saved.meta[STORED] = True
        if NOT_CHECKED in saved.meta:
            node.meta[NOT_CHECKED] = saved.meta[NOT_CHECKED]
        self.replacements[member.name] = node
        return node

    def _release(self, group: AliasGroup, event: Event, seq: int) -> None:
        hand_over = True  # the lowering makes it False where the generated code cannot drop its reference
        gone_by = self.plan.gone_by.get(group.slot)
        optional: list[Argument] = [] if gone_by is None else [gone_by]
        args = (self.handles[group.slot], self.stored[group.slot], seq, hand_over, event.flag, *optional)
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


def _nbytes(groups: Iterable[AliasGroup]) -> int | torch.SymInt:
    """The bytes of the groups; symbolic where their sizes are."""
    return sum(g.layout.nbytes if g.layout and g.layout.is_symbolic else g.nbytes for g in groups)


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype and, for certain, one shape; asking adds no guard."""
    return a.dtype == b.dtype and bool(statically_known_true(sym_eq(a.shape, b.shape)))
