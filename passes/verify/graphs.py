"""What must hold of the rewritten graphs.

Each rule raises `VerifyError`, which says what is broken, where, and which pass must see to it. What Inductor then
makes of the graphs is checked by `lowering/audit.py`; that extents of live groups do not overlap is the runtime's,
whose allocator decides it (`runtime/engines/extents.py`, `tests/runtime/test_runtime_extents.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_key, tensor_of, written
from ssd_fx.passes.plan import Offload, Plan
from ssd_fx.passes.verify.errors import require
from ssd_fx.passes.verify.interface import Before

ops = torch.ops.ssd_fx


def verify_graphs(partition: Partition, plan: Plan, before: Before) -> None:
    """Check the rewritten graphs against the plan and against what they were.

    Raises:
        VerifyError: a rule is broken.
        RuntimeError: of FX's own linter, such as for a release before its store, whose handle it is given.
    """
    for module in (partition.forward, partition.backward):
        module.graph.lint()
    _verify_saved(partition, plan, before)
    _verify_forward(partition, plan)
    _verify_backward(partition, plan)
    before.verify(partition, copied=any(g.pack is not None and g.pack.copy for g in plan.offloaded))
    before.reads.verify(partition, plan)


def _verify_saved(partition: Partition, plan: Plan, before: Before) -> None:
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
    nodes = list(partition.forward.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    stores = [n for n in nodes if n.target is ops.store.default]
    require(len(stores) == len(plan.offloaded), "stores and offloaded groups differ in number", "insert")
    slots = {_argument(n, "slot") for n in stores}
    require(slots == {g.slot for g in plan.offloaded}, f"slots {slots} are stored, others planned", "insert")
    by_storage, saved = nodes_by_storage(nodes), Counter(partition.saved)
    for store in stores:
        text = f"the handle {store.name!r} is not saved"
        require(saved[store] == 1, text, "insert", partition.fwd_output)
        tier: Any = _argument(store, "tier") if len(store.args) > 5 else ""
        binding: Any = _argument(store, "binding") if len(store.args) > 6 else False
        planned = plan.decisions[cast(int, _argument(store, "slot"))]
        text = f"store {store.name!r} goes to tier {tier!r}, binding {binding}, and the plan says {planned}"
        require(planned == Offload(tier, binding), text, "insert", store)
        releases = [u for u in store.users if u.target is ops.wait_store_.default]
        text = f"store {store.name!r} has {len(releases)} releases instead of one"
        require(len(releases) == 1, text, "insert", store)
        release, stored = releases[0], store.args[0]
        assert isinstance(stored, fx.Node)
        text = f"release of {store.name!r} holds another tensor than was stored"
        require(release.args[1] is stored, text, "insert", release)
        key = storage_key(stored.meta["val"])
        assert key is not None
        for alias in by_storage[key]:
            require(alias not in saved, f"{alias.name!r} is offloaded and saved too", "insert", partition.fwd_output)
            for user in alias.users:
                written = _writes(user, alias) and position[user] > position[store]
                require(not written, f"{alias.name!r} is written after its store", "alias", user)
                read = user.op != "output" and position[user] > position[release]
                require(not read, f"{alias.name!r} is read after its release {release.name!r}", "schedule", user)
    _verify_sequence(nodes, (ops.store.default, ops.wait_store_.default), "forward")


def _verify_backward(partition: Partition, plan: Plan) -> None:
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
        for user in load.users:  # and whoever reads a view of it comes behind the view
            text = f"load {load.name!r} is used by {user.name!r} before its wait"
            require(user is wait or position[user] > position[wait], text, "schedule", user)
        tensor = tensor_of(load)
        assert tensor is not None
        same = _same(tensor.shape, load.args[1]) and _same(tensor.stride(), load.args[2])
        same &= (tensor.dtype, tensor.device) == tuple(load.args[3:5])
        require(same, f"load {load.name!r} says another layout than its value has", "insert", load)
    _verify_sequence(nodes, (ops.load.default, ops.wait_load_.default), "backward")


def _same(sizes: Iterable[object], given: object) -> bool:
    """Whether an argument says these sizes; symbols are compared by name, so that no guard comes of it."""
    assert isinstance(given, (list, tuple))
    return [str(s) for s in sizes] == [str(g.meta["val"] if isinstance(g, fx.Node) else g) for g in given]


def _writes(user: fx.Node, alias: fx.Node) -> bool:
    """Whether a node other than ours writes into `alias` in place."""
    ours = isinstance(user.target, torch._ops.OpOverload) and user.target.namespace == "ssd_fx"
    return not ours and alias in written(user)


def _verify_sequence(nodes: list[fx.Node], targets: tuple[object, object], name: str) -> None:
    """Our nodes stand in the order of their `seq` argument, which counts from 0 without a gap."""
    for expected, node in enumerate(n for n in nodes if n.target in targets):
        text = f"{name} nodes are out of order: {node.name!r} has seq {seq_of(node)} and stands at {expected}"
        require(seq_of(node) == expected, text, "insert", node)


def seq_of(node: fx.Node) -> int:
    """The planned position that one of our nodes carries."""
    seq = _argument(node, "seq")
    assert isinstance(seq, int)
    return seq


def _argument(node: fx.Node, name: str) -> object:
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.args[[a.name for a in node.target._schema.arguments].index(name)]
