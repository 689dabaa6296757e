"""The user's decisions about tensors: marks in the model, patterns of module names, a function, checkpoint policies.

    joint graph   relu -> alias {custom: ssd_fx keep} -> mm
    lift          relu {marks: ssd_fx.keep} -> mm              the graph is as if nothing had been marked
    mark          group of relu: Mark(keep, "marked by ssd_fx.keep")

`lift` runs on the joint graph, before other passes match patterns in it or cut it. A mark is about a storage, so every
node of that storage gets it; the min-cut may save any of them. `mark` then gives each alias group at most one mark. A
call in the model comes first, then a pattern, then the user's function, and last a checkpoint policy.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ssd_fx.options import Tier
from ssd_fx.passes.cost.operators import hint
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint import modules
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_of, tensor_of
from ssd_fx.passes.plan import Keep, Mark, Offload, Plan
from ssd_fx.policy import Policy, SavedTensor

log = logging.getLogger("ssd_fx")

ANNOTATION = "ssd_fx"  # in meta["custom"], where torch.fx.traceback.annotate puts it
MARKS = "ssd_fx_marks"  # in node.meta: the names of the calls and policies that marked the storage
KEEP = "ssd_fx.keep"
OFFLOADS: dict[Tier | None, str] = {  # by the tier asked for
    None: "ssd_fx.offload",
    "host": "ssd_fx.offload(tier='host')",
    "ssd": "ssd_fx.offload(tier='ssd')",
}
_POLICIES = {
    policy: name
    for name in ("MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
    if (policy := getattr(CheckpointPolicy, name, None)) is not None
}


def lift(graph: fx.Graph) -> None:
    """Turn the annotations of a joint graph into marks in `node.meta`, and erase the nodes that carried them.

    `MUST_CPU_OFFLOAD` becomes `MUST_SAVE`, which the min-cut knows. To run this twice is the same as to run it once.
    """
    annotated = [n for n in graph.nodes if ANNOTATION in (n.meta.get("custom") or {})]
    tagged = [n for n in graph.nodes if n.meta.get("recompute") in _POLICIES]
    if not annotated and not tagged:
        return
    aliases = nodes_by_storage(graph.nodes)
    for node in annotated:
        if node.meta.get("partitioner_tag") != "is_backward":  # autograd's nodes inherit the annotation
            _put(node, node.meta["custom"][ANNOTATION], aliases)
    for node in tagged:
        policy = node.meta["recompute"]
        outputs = [node] if tensor_of(node) is not None else node.users
        for output in outputs:
            _put(output, _POLICIES[policy], aliases)
        if policy.name.startswith("MUST"):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in annotated:
        _erase(node)


def _put(node: fx.Node, name: str, aliases: dict[int, list[fx.Node]]) -> None:
    """Add the mark `name` to all nodes that share the node's storage."""
    key = storage_of(node)
    sharing = [node] if key is None else aliases[key]
    for alias in sharing:
        alias.meta[MARKS] = tuple(dict.fromkeys((*alias.meta.get(MARKS, ()), name)))


def _erase(node: fx.Node) -> None:
    """Remove the annotation, and the node if it is an alias that is no output.

    An output stays, because the callers of the graph know that it is a view of another tensor.
    """
    custom = node.meta["custom"]  # all nodes that were made under one `annotate` may share the dictionary
    node.meta["custom"] = {key: value for key, value in custom.items() if key != ANNOTATION}
    if node.target is torch.ops.aten.alias.default:
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")  # type: ignore[arg-type]
        if not node.users:
            node.graph.erase_node(node)


def mark(
    partition: Partition,
    plan: Plan,
    *,
    keep: Sequence[str],
    offload: Sequence[str],
    roots: Sequence[str] = (),
    policy: Policy | None = None,
    min_bytes: int = 0,
    recompute: bool = True,
) -> Plan:
    """Fill `plan.marks` and `plan.modules`. `keep` and `offload` are module name patterns; `roots` as in `modules`.

    `policy` is asked about groups of `min_bytes` or more. `recompute`: whether anything may be computed again.

    Raises:
        ValueError: the user asked to keep and to offload one group; the message names both calls or options. Or the
            policy returns no answer.
    """
    nodes = {n.name: n for n in partition.forward.graph.nodes}
    aliases = nodes_by_storage(nodes.values())
    marks = {}
    names = {}
    for group in plan.groups:
        base = nodes[group.base]
        around = modules.enclosing(base, roots)
        names[group.slot] = around[-1]
        callers = _callers(aliases[_key(base)])
        found = _of_calls(group, callers) or _of_patterns(group, around, keep, offload)
        if found is None and policy is not None and not group.obstacle and group.nbytes >= min_bytes:
            found = _of_function(policy, group, base, around[-1], recompute=recompute)
        found = found or _of_policies(callers)
        if found is not None:
            marks[group.slot] = found
    plan = plan.with_(marks=marks, modules=names)
    _log_unsaved(plan, nodes, aliases)
    _log_idle(plan, nodes, [*keep, *offload], roots)
    return plan


def forced(plan: Plan, group: AliasGroup, min_bytes: int) -> Keep | Offload | None:
    """The decision that a mark demands, whatever the budget; None where the planner is free.

    An obstacle outweighs every mark. `min_bytes` applies to marks by a pattern, since a module has small tensors that
    the user did not think of. It does not apply to a tensor that is marked itself.
    """
    found = plan.marks.get(group.slot)
    if found is None or group.obstacle:
        return None
    if found.decision == "keep":
        return Keep(found.reason)
    if found.decision == "recompute":  # a group that can be recomputed is not saved any more
        return Keep(f"{found.reason}, and it cannot be computed again")
    if found.decision == "offload" and (found.itself or group.nbytes >= min_bytes):
        return Offload()
    return None


def prefers_offload(plan: Plan, group: AliasGroup) -> bool:
    """Whether a checkpoint policy prefers to offload the group, without demanding it."""
    found = plan.marks.get(group.slot)
    return found is not None and found.decision == "prefer_offload"


def _key(node: fx.Node) -> int:
    key = storage_of(node)
    assert key is not None, "alias groups are made of tensors that have a storage"
    return key


def _callers(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The names of the calls and policies that marked one of these nodes."""
    return tuple(dict.fromkeys(name for n in nodes for name in n.meta.get(MARKS, ())))


def _of_calls(group: AliasGroup, callers: tuple[str, ...]) -> Mark | None:
    """The mark of `ssd_fx.keep` or `ssd_fx.offload`. A call with a tier outweighs one without."""
    asked = [tier for tier, name in OFFLOADS.items() if name in callers]
    tiers = [tier for tier in asked if tier is not None]
    calls = [KEEP, *(OFFLOADS[t] for t in asked)] if KEEP in callers else [OFFLOADS[t] for t in tiers]
    if len(calls) > 1:
        raise ValueError(
            f"tensor {group.base!r} ({group.nbytes} B) is marked by {calls[0]} and by {calls[1]}, itself or as a view "
            "of the same memory; right would be one of them"
        )
    if KEEP in callers:
        return Mark("keep", f"marked by {KEEP}")
    if tiers:
        return Mark("offload", f"marked by {OFFLOADS[tiers[0]]}", tier=tiers[0])
    return Mark("offload", f"marked by {OFFLOADS[None]}") if asked else None


def _of_patterns(
    group: AliasGroup, around: tuple[str, ...], keep: Sequence[str], offload: Sequence[str]
) -> Mark | None:
    """The mark of the pattern that matches the innermost module.

    With `keep=['blocks.0'], offload=['*.mlp']`, the group of a tensor in `blocks.0.mlp` is offloaded.
    """
    kept = modules.innermost(keep, around)
    gone = modules.innermost(offload, around)
    if kept and gone and kept[0] == gone[0]:
        raise ValueError(
            f"tensor {group.base!r} ({group.nbytes} B) of module {around[kept[0]]!r} is to be kept by "
            f"keep=[{kept[1]!r}] and offloaded by offload=[{gone[1]!r}]; right would be patterns of which one matches "
            "a module further inside"
        )
    if kept and (not gone or kept[0] > gone[0]):
        return Mark("keep", f"keep=[{kept[1]!r}]", itself=False)
    return Mark("offload", f"offload=[{gone[1]!r}]", itself=False) if gone else None


def _of_function(policy: Policy, group: AliasGroup, base: fx.Node, module: str, *, recompute: bool) -> Mark | None:
    """The mark that the user's function gives the group, or None."""
    tensor = tensor_of(base)
    assert tensor is not None, "a base is a tensor"
    made_by = base.all_input_nodes[0] if base.target is operator.getitem else base
    op = str(made_by.target) if made_by.op == "call_function" else "input"
    shape = tuple(hint(size) for size in tensor.shape)
    answer = policy(SavedTensor(base.name, module, op, shape, tensor.dtype, hint(group.nbytes)))
    reason = f"policy {policy.name} says {answer}"
    if answer == "recompute" and not recompute:
        return Mark("keep", f"{reason}, and recompute=False", itself=False)
    return Mark(answer, reason, itself=False) if answer else None


def _of_policies(callers: tuple[str, ...]) -> Mark | None:
    if "MUST_CPU_OFFLOAD" in callers:
        return Mark("offload", "MUST_CPU_OFFLOAD", tier="host")
    return Mark("prefer_offload", "PREFER_CPU_OFFLOAD", tier="host") if "PREFER_CPU_OFFLOAD" in callers else None


def _log_unsaved(plan: Plan, nodes: dict[str, fx.Node], aliases: dict[int, list[fx.Node]]) -> None:
    """Log the calls that mark no saved tensor. They are no error: another partition may save the tensor."""
    saved = {_key(nodes[g.base]) for g in plan.groups}
    for key, sharing in aliases.items():
        calls = [name for name in _callers(sharing) if name in (KEEP, *OFFLOADS.values())]
        if key not in saved and calls:
            where = sharing[0].meta.get("stack_trace") or ""
            log.info(
                "%s of %r has no effect in graph %s: it is not saved for backward, or lives anyway (a parameter, "
                "an input or an output). %s",
                " and ".join(calls),
                sharing[0].name,
                plan.graph,
                " ".join(where.strip().splitlines()[-2:]).strip(),
            )


def _log_idle(plan: Plan, nodes: dict[str, fx.Node], patterns: Sequence[str], roots: Sequence[str]) -> None:
    """Log the patterns that match modules of the graph none of whose tensors is saved. Another graph may save some."""
    around = {name: modules.enclosing(node, roots) for name, node in nodes.items()} if patterns else {}
    saved = {group.base for group in plan.groups}
    for pattern in patterns:
        named = {name for name, names in around.items() if any(modules.matches(pattern, m) for m in names)}
        if named and not named & saved:
            text = "module pattern %r has no effect in graph %s: nothing that its modules compute is saved for backward"
            log.info(text, pattern, plan.graph)
