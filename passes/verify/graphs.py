"""The rules of the rewritten graphs.

    forward    store -> one release;  no node writes the storage after the store, or reads it after the release
    backward   load -> one wait;      no node reads the loaded tensor before the wait

Two things are checked elsewhere. `lowering/audit.py` checks what Inductor makes of the graphs. The runtime's allocator
sees to it that extents of live groups do not overlap (`runtime/engines/extents.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
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
    _verify_forward(partition, plan)
    _verify_backward(partition, plan)
    before.verify(partition, copied=any(g.pack is not None and g.pack.copy for g in plan.offloaded))
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


def _verify_forward(partition: Partition, plan: Plan) -> None:
    """Each offloaded group has one store, and each store one release. Stored storages are not touched too late."""
    nodes = list(partition.forward.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    stores = [n for n in nodes if n.target is ops.store.default]
    require(len(stores) == len(plan.offloaded), "stores and offloaded groups differ in number", "insert")
    slots = {arguments_of(n)["slot"] for n in stores}
    require(slots == {g.slot for g in plan.offloaded}, f"slots {slots} are stored, others planned", "insert")
    by_storage = nodes_by_storage(nodes)
    saved, outputs = Counter(partition.saved), set(partition.caller_outputs)
    for store in stores:
        require(saved[store] == 1, f"the handle {store.name!r} is not saved", "insert", partition.fwd_output)
        release = _verify_store(store, plan)
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
    _verify_sequence(nodes, (ops.store.default, ops.wait_store_.default), "forward")


def _verify_store(store: fx.Node, plan: Plan) -> fx.Node:
    """The release of a store. The store does what the plan says, and the release holds the tensor that was stored."""
    given = arguments_of(store)
    tier = given["tier"]
    binding = given["binding"]
    planned = plan.decisions[given["slot"]]
    text = f"store {store.name!r} goes to tier {tier!r}, binding {binding}, and the plan says {planned}"
    require(planned == Offload(tier, binding), text, "insert", store)
    later = plan.points[given["slot"]].later
    text = f"store {store.name!r} says later={given['later']}, and the plan says {later}"
    require(given["later"] is later, text, "insert", store)
    releases = [u for u in store.users if u.target is ops.wait_store_.default]
    text = f"store {store.name!r} has {len(releases)} releases instead of one"
    require(len(releases) == 1, text, "insert", store)
    text = f"release of {store.name!r} holds another tensor than was stored"
    require(releases[0].args[1] is store.args[0], text, "insert", releases[0])
    return releases[0]


def _verify_backward(partition: Partition, plan: Plan) -> None:
    """Each store has one load, and each load one wait. Nothing uses a loaded tensor before its wait."""
    nodes = list(partition.backward.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    loads = [n for n in nodes if n.target is ops.load.default]
    require(len(loads) == len(plan.offloaded), "loads and offloaded groups differ in number", "insert")
    handles = {n.name for n in partition.forward.graph.nodes if n.target is ops.store.default}
    loaded = [getattr(n.args[0], "name", "") for n in loads]
    require(sorted(loaded) == sorted(handles), f"{sorted(loaded)} are loaded, {sorted(handles)} stored", "insert")
    for load in loads:
        waits = [u for u in load.users if u.target is ops.wait_load_.default]
        require(len(waits) == 1, f"load {load.name!r} has {len(waits)} waits instead of one", "insert", load)
        wait = waits[0]
        require(wait.args[1] is load.args[0], f"wait of {load.name!r} has the handle of another", "insert", wait)
        for user in load.users:  # a reader of a view comes after the view, which is a user
            text = f"load {load.name!r} is used by {user.name!r} before its wait"
            require(user is wait or position[user] > position[wait], text, "select", user)
        require(_is_as_given(load), f"load {load.name!r} says another layout than its value has", "insert", load)
    _verify_sequence(nodes, (ops.load.default, ops.wait_load_.default), "backward")


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


def _verify_sequence(nodes: list[fx.Node], targets: tuple[object, object], name: str) -> None:
    """Our nodes are in the order of their `seq` argument, which counts from 0 without a gap."""
    for expected, node in enumerate(n for n in nodes if n.target in targets):
        seq = arguments_of(node)["seq"]
        text = f"{name} nodes are out of order: {node.name!r} has seq {seq} and stands at {expected}"
        require(seq == expected, text, "insert", node)
