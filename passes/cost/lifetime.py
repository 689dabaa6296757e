"""When each alias group is produced, last read by the forward and first read by the backward.

Views do not count as reads. Only an operator that yields another storage reads the bytes, at the place of the kernel
that it is fused into.
"""

from __future__ import annotations

from torch import fx

from ssd_fx.passes.axis import Item
from ssd_fx.passes.cost.footprint import both_buffers
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.partition import Partition, storage_key, tensors_of
from ssd_fx.passes.plan import Plan


def lifetime(partition: Partition, plan: Plan) -> Plan:
    """Fill `plan.items` for every group that can be offloaded. Needs `plan.groups`."""
    forward, backward = list(partition.forward.graph.nodes), list(partition.backward.graph.nodes)
    fwd_position = {n: i for i, n in enumerate(forward)}
    bwd_position = {n: i for i, n in enumerate(backward)}
    fwd_by_name = {n.name: n for n in forward}
    fwd_buffers, bwd_buffers = partition.once(both_buffers)
    placeholders = partition.bwd_placeholders

    last_input = max((i for i, n in enumerate(forward) if n.op == "placeholder"), default=0)

    def of(group: AliasGroup) -> Item:
        base = fwd_by_name[group.base]
        key = storage_key(base.meta["val"])
        assert key is not None
        # Whatever is fused, no node of the graph may read behind the release.
        last = max(last_read(base, fwd_position), fwd_buffers.last[key], fwd_buffers.read_last[key])
        if base.op == "placeholder":  # the caller has it until the forward returns
            last = len(forward) - 2
        if group.pack is not None and group.pack.copy:  # only the store reads the copy
            last = fwd_position[base]
        keys = {storage_key(placeholders[m.name].meta["val"]) for m in group.members}
        # A reader that is fused into an earlier kernel would take the wait along, and with it the load; and whatever is
        # fused, no node of the graph may read before the wait.
        reads = [bwd_buffers.read_first[k] for k in keys if k is not None and k in bwd_buffers.read_first]
        first = min([first_read(placeholders[m.name], bwd_position) for m in group.members] + reads)
        last_bwd = max(first, *(bwd_buffers.last[k] for k in keys if k is not None))
        # No node may stand between the inputs of a graph, so every input counts as produced at the last one.
        return Item(
            nbytes=group.nbytes,
            produced=max(fwd_position[base], last_input),
            last_use=max(last, last_input),
            first_use=len(forward) + first,
            last_bwd_use=len(forward) + last_bwd,
            stored_nbytes=group.stored_nbytes,
        )

    return plan.with_(items={g.slot: of(g) for g in plan.groups if not g.obstacle})


def first_read(placeholder: fx.Node, position: dict[fx.Node, int]) -> int:
    """Position of the first node that reads the placeholder or a view of it; the end of the graph if none does."""
    views = view_closure(placeholder)
    readers = [position[u] for n in views for u in n.users if u not in views]
    return min(readers, default=len(position) - 1)


def last_read(base: fx.Node, position: dict[fx.Node, int]) -> int:
    """Position of the last node that reads `base` or a view of it, but for the output; its own if none does."""
    views = view_closure(base)
    return max([position[base], *(position[u] for n in views for u in n.users if u not in views and u.op != "output")])


def view_closure(node: fx.Node) -> dict[fx.Node, None]:
    """The node and all nodes of its graph that are views of it, or tuples of nothing but such views."""
    key = storage_key(node.meta["val"])
    closure = {node: None}
    work = [node]
    while work:
        for user in work.pop().users:
            if user in closure:
                continue
            tensors = tensors_of(user)
            if tensors and all(storage_key(v) == key for v in tensors):
                closure[user] = None
                work.append(user)
    return closure
