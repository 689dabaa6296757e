"""The rules of the rewritten graphs.

    both       our nodes are the events of the schedule, in its order
    forward    no node writes a stored storage after its store, or reads it after its release
    backward   no node reads a loaded tensor before its wait

Two things are checked elsewhere. `lowering/audit.py` checks what Inductor makes of the graphs. The runtime's allocator
sees to it that extents of live groups do not overlap (`runtime/engines/extents.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.alias.channels import is_laid_out
from ssd_fx.passes.partition import (
    Partition,
    arguments_of,
    calls_ours,
    nodes_by_storage,
    storage_of,
    tensor_of,
    written,
)
from ssd_fx.passes.plan import Offload, Plan
from ssd_fx.passes.schedule import LOAD, RELEASE, STORE, WAIT, Event, Kind
from ssd_fx.passes.verify.errors import require
from ssd_fx.passes.verify.interface import Before

ops = torch.ops.ssd_fx


def verify_graphs(partition: Partition, plan: Plan, before: Before) -> None:
    """Check the rewritten graphs against the plan and against what they were.

    Raises:
        VerifyError: a rule is broken.
        RuntimeError: FX's linter found a fault, such as a node before one of its arguments.
    """
    for module in (partition.forward, partition.backward):
        module.graph.lint()
    _verify_saved(partition, plan, before)
    forward, backward = list(partition.forward.graph.nodes), list(partition.backward.graph.nodes)
    slots = {n.name: arguments_of(n)["slot"] for n in forward if n.target is ops.store.default}
    ours = _verify_order(forward, plan.schedule.forward, slots, "forward")
    ours |= _verify_order(backward, plan.schedule.backward, slots, "backward")
    _verify_forward(partition, plan, ours)
    _verify_backward(partition, plan, ours)
    bases = {n.name: n for n in forward}
    other = any((g.pack is not None and g.pack.copy) or is_laid_out(g, bases[g.base]) for g in plan.offloaded)
    before.verify(partition, restrided=other)
    before.reads.verify(partition, plan)


def _verify_saved(partition: Partition, plan: Plan, before: Before) -> None:
    """Saved tensors have placeholders of their names, in the same order. No offloaded tensor is saved."""
    placeholders = partition.bwd_placeholders
    paired = [n for n in partition.saved if n.name not in before.unpaired]
    for node in paired:
        text = f"saved {node.name!r} has no placeholder of its name in the backward"
        require(node.name in placeholders, text, "insert", partition.fwd_output)
    saved_order = [n.name for n in paired if isinstance(n.meta.get("val"), torch.Tensor)]
    saved_names = set(saved_order)
    backward_order = [n for n in placeholders if n in saved_names]
    require(saved_order == backward_order, "saved tensors and backward inputs differ in order", "insert")
    left = {m.name for g in plan.offloaded for m in g.members} & {n.name for n in partition.saved}
    require(not left, f"{sorted(left)} are offloaded and saved too", "insert", partition.fwd_output)


def _verify_order(
    nodes: list[fx.Node], events: Sequence[Event], slots: Mapping[str, int], name: str
) -> dict[tuple[Kind, int], fx.Node]:
    """Our nodes of a graph by kind and slot. They are the events of the schedule, in its order: of the same kinds and
    groups, with their flags and positions.

    `slots`: the slots of the groups, by the names of their handles.
    """
    ours = [n for n in nodes if n.target in _KINDS]
    require(len(ours) == len(events), f"the {name} has {len(ours)} nodes of ours instead of {len(events)}", "insert")
    for position, (node, event) in enumerate(zip(ours, events, strict=True)):
        given, (kind, index, flag) = arguments_of(node), _KINDS[node.target]
        text = f"{name} nodes are out of order: {node.name!r} has seq {given['seq']} and stands at {position}"
        require(given["seq"] == position, text, "insert", node)
        slot = given["slot"] if kind is STORE else slots.get(getattr(node.args[index], "name", ""))
        text = f"{node.name!r} stands where the plan has the {event.kind.name.lower()} of slot {event.slot}"
        require((kind, slot) == (event.kind, event.slot), text, "insert", node)
        if flag:
            text = f"{node.name!r} says {flag}={given[flag]}, and the plan says {event.flag}"
            require(given[flag] is event.flag, text, "insert", node)
    return {(event.kind, event.slot): node for node, event in zip(ours, events, strict=True)}


_KINDS: dict[object, tuple[Kind, int, str]] = {
    ops.store.default: (STORE, 0, "later"),
    ops.wait_store_.default: (RELEASE, 0, "block"),
    ops.load.default: (LOAD, 0, "strict"),
    ops.wait_load_.default: (WAIT, 1, ""),
}
"""For each of our operators: the kind of event, the index of the argument with the handle, the name of the flag."""


def _verify_forward(partition: Partition, plan: Plan, ours: Mapping[tuple[Kind, int], fx.Node]) -> None:
    """Stores are as planned, releases hold the stored tensors, and no stored storage is touched too late."""
    nodes = list(partition.forward.graph.nodes)
    position, by_storage = {n: i for i, n in enumerate(nodes)}, nodes_by_storage(nodes)
    saved, outputs = Counter(partition.saved), set(partition.caller_outputs)
    for slot in plan.schedule:
        store, release, given = ours[STORE, slot], ours[RELEASE, slot], arguments_of(ours[STORE, slot])
        require(saved[store] == 1, f"the handle {store.name!r} is not saved", "insert", partition.fwd_output)
        planned, (tier, binding) = plan.decisions[slot], (given["tier"], given["binding"])
        text = f"store {store.name!r} goes to tier {tier!r}, binding {binding}, and the plan says {planned}"
        require(planned == Offload(tier, binding), text, "insert", store)
        text = f"release of {store.name!r} holds another tensor than was stored"
        require(release.args[1] is store.args[0], text, "insert", release)
        said, goes = arguments_of(release)["gone_by"], plan.gone_by.get(slot, -1)
        text = f"release of {store.name!r} says gone_by={said}, and the plan says {goes}"
        require(said == goes, text, "insert", release)
        key = storage_of(release.args[1])  # type: ignore[arg-type]
        assert key is not None
        for alias in by_storage[key]:
            require(alias not in saved, f"{alias.name!r} is offloaded and saved too", "insert", partition.fwd_output)
            require(
                alias not in outputs, f"{alias.name!r} is offloaded and the caller's", "alias", partition.fwd_output
            )
            for user in alias.users:
                is_late = _writes(user, alias) and position[user] > position[store]
                require(not is_late, f"{alias.name!r} is written after its store", "alias", user)
                is_late = user.op != "output" and position[user] > position[release]
                require(not is_late, f"{alias.name!r} is read after its release {release.name!r}", "select", user)


def _verify_backward(partition: Partition, plan: Plan, ours: Mapping[tuple[Kind, int], fx.Node]) -> None:
    """Each wait has its load's tensor, loads name the layout that they yield, no node uses a tensor before its wait."""
    position = {n: i for i, n in enumerate(partition.backward.graph.nodes)}
    for slot in plan.schedule:
        load, wait = ours[LOAD, slot], ours[WAIT, slot]
        require(wait.args[0] is load, f"wait of {load.name!r} has the tensor of another", "insert", wait)
        for user in load.users:  # a reader of a view comes after the view, which is a user
            text = f"load {load.name!r} is used by {user.name!r} before its wait"
            require(user is wait or position[user] > position[wait], text, "select", user)
        require(_is_as_given(load), f"load {load.name!r} says another layout than its value has", "insert", load)


def _is_as_given(load: fx.Node) -> bool:
    """Whether the FakeTensor of a load has the layout that its arguments give."""
    tensor = tensor_of(load)
    assert tensor is not None
    size, stride, dtype, device = load.args[1:5]
    return (
        _same(tensor.shape, size)
        and _same(tensor.stride(), stride)
        and (tensor.dtype, tensor.device) == (dtype, device)
    )


def _same(sizes: Iterable[object], given: object) -> bool:
    """Whether an argument gives these sizes. Symbols are compared by name, which adds no guard."""
    assert isinstance(given, (list, tuple))
    return [str(s) for s in sizes] == [str(g.meta["val"] if isinstance(g, fx.Node) else g) for g in given]


def _writes(user: fx.Node, alias: fx.Node) -> bool:
    """Whether a node other than ours writes into `alias` in place."""
    return not calls_ours(user) and alias in written(user)
