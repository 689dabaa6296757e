"""What must hold of a plan and of the rewritten graphs; checked after every pass.

Each rule raises `VerifyError`, which says what is broken, where, and which pass must see to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.passes.partition import Partition, storage_key, tensor_of
from ssd_fx.passes.plan import AliasGroup, Offload, Plan

ops = torch.ops.ssd_fx


class VerifyError(RuntimeError):
    """A plan or a rewritten graph broke a rule: a bug in a pass, never the fault of a model."""


def verify_plan(partition: Partition, plan: Plan) -> None:
    """Check as much of the plan as there is."""
    forward = {n.name: i for i, n in enumerate(partition.forward.graph.nodes)}
    members = [m.name for g in plan.groups for m in g.members]
    _require(len(members) == len(set(members)), "a saved tensor is in two alias groups", "alias")
    for group in plan.groups:
        _require(group.base in forward, f"base {group.base!r} of slot {group.slot} is not in the forward", "alias")
        if isinstance(plan.decisions.get(group.slot), Offload):
            _require(not group.obstacle, f"{group.base!r} is offloaded but {group.obstacle}", "select")
            _verify_points(plan, group)


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
        _require(holds, text, "schedule")


@dataclass(frozen=True)
class Before:
    """What must be the same after the rewrite.

    `outputs`: names of the outputs that the caller sees. `unpaired`: saved outputs without a backward placeholder of
    their name, such as the state of a random generator, which PyTorch's partitioner names differently on both sides.
    """

    outputs: tuple[str, ...]
    unpaired: frozenset[str]

    @staticmethod
    def of(partition: Partition) -> Before:
        placeholders = partition.bwd_placeholders
        unpaired = frozenset(n.name for n in partition.saved if n.name not in placeholders)
        return Before(tuple(n.name for n in partition.kept_outputs), unpaired)


def verify_graphs(partition: Partition, plan: Plan, before: Before) -> None:
    """Check the rewritten graphs against the plan and against what they were."""
    for module in (partition.forward, partition.backward):
        module.graph.lint()
    outputs = tuple(n.name for n in partition.kept_outputs)
    _require(outputs == before.outputs, "an output of the model changed", "insert")
    placeholders = partition.bwd_placeholders
    paired = [n for n in partition.saved if n.name not in before.unpaired]
    for node in paired:
        _require(
            node.name in placeholders, f"saved {node.name!r} has no placeholder of its name in the backward", "insert"
        )
    saved_order = [n.name for n in paired if isinstance(n.meta.get("val"), torch.Tensor)]
    saved_names = set(saved_order)
    backward_order = [n for n in placeholders if n in saved_names]
    _require(saved_order == backward_order, "saved tensors and backward inputs differ in order", "insert")
    _verify_forward(partition, plan)
    _verify_backward(partition, plan)


def _verify_forward(partition: Partition, plan: Plan) -> None:
    nodes = list(partition.forward.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    _require(
        _in_sequence(nodes, (ops.store.default, ops.wait_store_.default)), "forward nodes are out of order", "insert"
    )
    saved = set(partition.saved)
    stores = [n for n in nodes if n.target is ops.store.default]
    _require(len(stores) == len(plan.offloaded), "stores and offloaded groups differ in number", "insert")
    storages: dict[int, list[fx.Node]] = {}
    for node in nodes:
        tensor = tensor_of(node)
        key = storage_key(tensor) if tensor is not None else None
        if key is not None:
            storages.setdefault(key, []).append(node)
    for store in stores:
        releases = [u for u in store.users if u.target is ops.wait_store_.default]
        _require(len(releases) == 1, f"store {store.name!r} has {len(releases)} releases instead of one", "insert")
        release, base = releases[0], store.args[0]
        assert isinstance(base, fx.Node)
        _require(release.args[1] is base, f"release of {store.name!r} holds another tensor than was stored", "insert")
        key = storage_key(base.meta["val"])
        assert key is not None
        for alias in storages[key]:
            _require(not _writes(alias.users, alias), f"{alias.name!r} is written after its store", "alias")
            readers = [u for u in alias.users if u.op != "output" and position[u] > position[release]]
            _require(not readers, f"{alias.name!r} is read after its release {release.name!r}", "schedule")
            _require(alias not in saved, f"{alias.name!r} is offloaded and saved too", "insert")


def _verify_backward(partition: Partition, plan: Plan) -> None:
    nodes = list(partition.backward.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    _require(
        _in_sequence(nodes, (ops.load.default, ops.wait_load_.default)), "backward nodes are out of order", "insert"
    )
    loads = [n for n in nodes if n.target is ops.load.default]
    _require(len(loads) == len(plan.offloaded), "loads and offloaded groups differ in number", "insert")
    for load in loads:
        waits = [u for u in load.users if u.target is ops.wait_load_.default]
        _require(len(waits) == 1, f"load {load.name!r} has {len(waits)} waits instead of one", "insert")
        early = [u.name for u in load.users if u is not waits[0] and position[u] < position[waits[0]]]
        _require(not early, f"load {load.name!r} is used by {early} before its wait", "schedule")
        tensor, size, stride = tensor_of(load), load.args[1], load.args[2]
        same = tensor is not None and list(tensor.shape) == size and list(tensor.stride()) == stride
        _require(same, f"load {load.name!r} says another layout than its value has", "insert")


def _writes(users: Iterable[fx.Node], alias: fx.Node) -> bool:
    """Whether a node other than ours writes into `alias` in place."""
    for user in users:
        if not isinstance(user.target, torch._ops.OpOverload) or user.target.namespace == "ssd_fx":
            continue
        for arg, info in zip(user.args, user.target._schema.arguments, strict=False):
            if arg is alias and info.alias_info is not None and info.alias_info.is_write:
                return True
    return False


def _in_sequence(nodes: list[fx.Node], targets: tuple[object, object]) -> bool:
    """Whether our nodes stand in the order of their `seq` argument."""
    seqs = [seq_of(n) for n in nodes if n.target in targets]
    return seqs == sorted(seqs)


def seq_of(node: fx.Node) -> int:
    """The planned position that one of our nodes carries."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    seq = node.args[names.index("seq")]
    assert isinstance(seq, int)
    return seq


def _require(holds: bool, text: str, culprit: str) -> None:
    if not holds:
        raise VerifyError(f"{text}; see pass {culprit!r}")
