"""What must hold of a plan and of the rewritten graphs; checked after every pass.

Each rule raises `VerifyError`, which says what is broken, where, and which pass must see to it. What Inductor then
makes of the graphs is checked by `audit.py`; that extents of live groups do not overlap is the runtime's, whose
allocator decides it (`runtime/extents.py`, `tests/runtime/test_runtime_extents.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.before import Before
from ssd_fx.passes.fault import VerifyError, require
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.packing import is_dense, span
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_key, tensor_of, written
from ssd_fx.passes.plan import Offload, Plan, Prediction
from ssd_fx.passes.refine import kept_bytes

__all__ = ["Before", "PlanRule", "VerifyError", "seq_of", "verify_graphs", "verify_plan"]

ops = torch.ops.ssd_fx
PlanRule = Callable[[Partition, Plan], None]  # raises VerifyError


def verify_plan(partition: Partition, plan: Plan, *, rules: Iterable[PlanRule] = ()) -> None:
    """Check as much of the plan as there is, and `rules` of the caller's beside it."""
    forward = {n.name: i for i, n in enumerate(partition.forward.graph.nodes)}
    members = [m.name for g in plan.groups for m in g.members]
    require(len(members) == len(set(members)), "a saved tensor is in two alias groups", "alias")
    unsaved = sorted(set(members) - {n.name for n in partition.saved})
    require(not unsaved, f"members {unsaved} are not saved", "alias")
    slots = {g.slot for g in plan.groups}
    require(len(slots) == len(plan.groups), "two alias groups have one slot", "alias")
    require(set(plan.decisions) <= slots, "a decision is about no alias group", "select")
    require(not plan.decisions or set(plan.decisions) == slots, "an alias group has no decision", "select")
    offloaded = {g.slot for g in plan.offloaded}
    require(not plan.points or set(plan.points) == offloaded, "points and offloaded groups differ", "schedule")
    for group in plan.groups:
        require(group.base in forward, f"base {group.base!r} of slot {group.slot} is not in the forward", "alias")
        if isinstance(plan.decisions.get(group.slot), Offload):
            require(not group.obstacle, f"{group.base!r} is offloaded but {group.obstacle}", "select")
            _verify_members(group)
            _verify_points(plan, group)
    if plan.prediction is not None:
        _verify_limits(partition, plan.prediction)
        _verify_places(plan, plan.prediction)
        _verify_host(plan, plan.prediction)
    for rule in rules:
        rule(partition, plan)


def _verify_limits(partition: Partition, found: Prediction) -> None:
    """The predicted memory, and what is kept of what can leave, are within the limits."""
    step, outcome, limits = found.modelled.step, found.solution.outcome, found.limits
    if outcome.peak > limits.memory:
        p = outcome.memory.index(outcome.peak)
        graph = partition.forward.graph if p < step.forward else partition.backward.graph
        at = list(graph.nodes)[found.modelled.begins[p]]
        text = f"{outcome.peak} B are predicted at {at.name!r}, and the budget allows {int(limits.memory)} B"
        require(False, text, "select", at)
    kept = kept_bytes(step, found.solution.choices)
    require(kept <= limits.kept, f"{kept} B are kept, and the budget allows {int(limits.kept)} B", "select")


def _verify_places(plan: Plan, found: Prediction) -> None:
    """The nodes release no later and load no earlier than in the step whose memory was predicted."""
    begins, ends = found.modelled.begins, found.modelled.ends
    items = {slot: i for i, slot in enumerate(found.modelled.slots)}
    bases = {g.slot: g.base for g in plan.groups}
    for slot, points in plan.points.items():
        transfer, name = found.solution.transfers[items[slot]], bases[slot]
        late = points.release_after > ends[transfer.release_after] or points.block != transfer.block
        require(not late, f"{name!r} is released later than was predicted", "schedule")
        text = f"{name!r} is loaded earlier than was predicted"
        require(points.load_before >= begins[transfer.load_before], text, "schedule")


def _verify_host(plan: Plan, found: Prediction) -> None:
    """What is in host memory at a time fits there, and is what the plan puts there."""
    budget, outcome = found.modelled.step.host_budget, found.solution.outcome
    text = f"the plan has {outcome.host_peak} B in host memory, where {budget} B may be"
    require(outcome.host_peak <= budget, text, "select")
    hosted = sum(g.stored_nbytes for g in plan.offloaded if plan.tier(g.slot) == "host")
    text = f"{hosted} B are to go to host memory, and {outcome.host_peak} B are predicted there"
    require(hosted == outcome.host_peak, text, "select")


def _verify_members(group: AliasGroup) -> None:
    """What is stored is dense, and every member lies within it."""
    stored = group.layout
    require(stored is not None and is_dense(stored), f"what is stored of {group.base!r} has gaps", "alias")
    assert stored is not None
    if stored.is_symbolic:
        return  # then it is all of a storage, in which all of its views lie
    for member in group.members:
        layout = member.copy.chain[0].source if member.copy else member.layout
        inside = span(layout) * layout.dtype.itemsize <= stored.numel * stored.dtype.itemsize
        require(inside, f"member {member.name!r} lies outside of what is stored of {group.base!r}", "alias")


def _verify_points(plan: Plan, group: AliasGroup) -> None:
    points = plan.points.get(group.slot)
    if points is None:
        return
    life, name = plan.lifetimes[group.slot], group.base
    rules = (
        (points.store_after >= life.produced, f"store of {name!r} comes before the tensor is produced"),
        (points.release_after >= points.store_after, f"release of {name!r} comes before its store"),
        (points.release_after >= life.last_fwd_use, f"{name!r} is read in the forward after its release"),
        (points.load_before <= points.wait_before, f"load of {name!r} comes after its wait"),
        (points.wait_before <= life.first_bwd_use, f"{name!r} is used in the backward before its wait"),
    )
    for holds, text in rules:
        require(holds, text, "schedule")


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
