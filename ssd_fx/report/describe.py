"""What is told of a plan, as values: rows and figures, which the dump prints and the graph carries for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ssd_fx.passes.decide import machine_of
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint.modules import enclosing, source_line
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_of
from ssd_fx.passes.plan import Keep, Offload, Plan, replay_of
from ssd_fx.passes.schedule import Replay
from ssd_fx.report.limit import storage_bytes
from ssd_fx.report.model import GraphReport, GroupRow, Times
from ssd_fx.report.timeline import Timeline, thinned
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.inflight import LEAST_BYTES

POINTS = 240  # of a curve of memory, in each direction
OUTPUT = "an output of the graph, which the caller gets"

Sources = Mapping[str, str]  # the lines of the model by the names of the forward's nodes


def source_lines(partition: Partition, arguments: Sequence[str] = (), function: str = "") -> Sources:
    """By name of a node, its line of the model, or, for an input, its name among the `arguments` of `function`."""
    of = f" of {function}" if function else ""
    found = {n.name: line for n in partition.forward.graph.nodes if (line := source_line(n))}
    for node in partition.forward.graph.find_nodes(op="placeholder"):
        index = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(index, int) and index < len(arguments):
            found[node.name] = f"argument {arguments[index]}"
    return {name: f"{line}{of}" if line.startswith("argument ") else line for name, line in found.items()}


def about(arguments: Sequence[str], function: str, partition: Partition, plan: Plan, options: PlanOptions) -> str:
    """`describe`, packed: an argument of the graph's first node. For `Partitioner.about`."""
    return describe(partition, plan, options, arguments, function).packed()


def describe(
    partition: Partition, plan: Plan, options: PlanOptions, arguments: Sequence[str] = (), function: str = ""
) -> GraphReport:
    """The plan of a partition that is not rewritten yet.

    arguments: the names of the Dynamo graph's inputs. function: what they are the arguments of.
    """
    sources, runtime = source_lines(partition, arguments, function), parse(options.runtime_config)
    baseline = plan.origin.baseline
    assert baseline is not None, "select fills it"
    gradients = storage_bytes(partition.lasting_gradients)
    return GraphReport(
        graph=plan.graph,
        budget=options.budget,
        min_bytes=options.min_bytes,
        inflight=runtime.inflight_bytes or LEAST_BYTES,
        prefetch=options.prefetch,
        rates=options.source,
        saved_bytes=int(plan.saved_bytes),
        offloaded_bytes=int(plan.offloaded_bytes),
        predicted=predicted(plan),
        host_speedup=round(_host_speedup(partition, options), 1),
        whole=partition.is_whole_step,
        stock=_step(plan.graph, baseline, int(plan.origin.saved_bytes), gradients),
        own=_step(plan.graph, replay_of(plan), int(plan.kept_bytes), gradients),
        rows=(*_groups(partition, plan, sources), *_outputs(partition, plan.graph, options, sources)),
        recomputed=recomputed(plan, sources),
        memory=runtime.memory,
    )


def predicted(plan: Plan) -> dict[str, float]:
    """The simulator's predictions for the plan: seconds, and bytes above the level before the step."""
    found, limits = replay_of(plan), plan.limits
    return {
        "step_s": found.seconds,
        "compute_s": found.compute_s,
        "transfer_s": found.transfer_s,
        "write_stall_s": found.write_stall_s,
        "read_stall_s": found.read_stall_s,
        "peak_bytes": found.peak,
        "limit_bytes": int(limits.memory),
        "floor_bytes": found.step.floor,
        "kept_peak_bytes": found.step.everything,
        "written_bytes": found.written,
        **({"shared_budget_bytes": limits.shared} if limits.shared else {}),
        **_host(plan),
    }


def _host(plan: Plan) -> dict[str, float]:
    found, resident = replay_of(plan), plan.limits.resident
    if found.step.host_budget:
        return {"host_peak_bytes": found.host_peak, "host_budget_bytes": found.step.host_budget}
    return {"resident_bytes": resident} if resident else {}


def _host_speedup(partition: Partition, options: PlanOptions) -> float:
    """How many times as fast as the drives host memory would be. 0 on the CPU, which has no other memory, and where
    there is a host budget already."""
    if not partition.has_host_tier or options.host_budget:
        return 0.0
    machine = machine_of(partition, options)
    return machine.lanes("host").write_bw / machine.write_bw


def recomputed(plan: Plan, sources: Sources) -> list[dict[str, Any]]:
    """The tensors that the partition was made to compute again."""
    return [
        {
            "name": r.base,
            "module": r.module,
            "source": sources.get(r.base, ""),
            "nbytes": r.nbytes,
            "seconds": r.seconds,
        }
        for r in plan.recomputed
    ]


def decided(plan: Plan, group: AliasGroup, sources: Sources, shared: str = "", times: Times | None = None) -> GroupRow:
    """What is decided of a group, and where people find it."""
    decision, mark = plan.decisions[group.slot], plan.marks.get(group.slot)
    assert isinstance(decision, Keep | Offload), "the partition that recomputes does not save what it recomputes"
    if isinstance(decision, Keep):
        what, reason = "keep", decision.reason
    else:
        what, reason = "offload", "" if mark is None else mark.reason
    return GroupRow(
        graph=plan.graph,
        slot=group.slot,
        name=group.base,
        module=plan.modules.get(group.slot, ""),
        source=sources.get(group.base, ""),
        nbytes=int(group.nbytes),
        stored_nbytes=int(group.stored_nbytes),
        decision=what,
        tier=plan.tier(group.slot),
        reason=reason,
        marked=mark is not None,
        shared=shared,
        times=times or {},
    )


def _groups(partition: Partition, plan: Plan, sources: Sources) -> Iterator[GroupRow]:
    inputs = {storage_of(n) for n in partition.activation_inputs} - {None}
    by_name = {n.name: n for n in partition.forward.graph.nodes}
    for group in plan.groups:
        shared = "input" if storage_of(by_name[group.base]) in inputs else ""
        yield decided(plan, group, sources, shared, _times(plan, group.slot) if group.slot in plan.items else None)


def _times(plan: Plan, slot: int) -> Times:
    """Begin and end of each event that is predicted of a group, by kind."""
    return {kind: _rounded(*span) for kind, span in plan.times(slot).items()}


def _step(graph: str, over: Replay, stays: int, gradients: int) -> Timeline:
    """A replay as a timeline. Its curve of memory has the highest value of each of at most `POINTS` parts of either
    direction."""
    starts, memory, turned = over.starts, over.memory, over.step.forward
    points = (*_curve(starts[:turned], memory[:turned]), *_curve(starts[turned:-1], memory[turned:]))
    turn, end = _rounded(starts[turned], starts[-1])
    return Timeline((graph,), memory=points, turn_s=turn, end_s=end, stays=stays, gradients=gradients)


def _curve(starts: Sequence[float], memory: Sequence[int]) -> list[tuple[float, int]]:
    """The points of a curve, thinned. Where it is level it has the first point only."""
    points = thinned([*zip(_rounded(*starts), map(int, memory), strict=True)], POINTS)
    return [point for i, point in enumerate(points) if not i or points[i - 1][1] != point[1]]


def _rounded(*seconds: float) -> tuple[float, ...]:
    """Whole microseconds, in seconds: a graph carries no more digits."""
    return tuple(round(1e6 * each) / 1e6 for each in seconds)


def _outputs(partition: Partition, graph: str, options: PlanOptions, sources: Sources) -> Iterator[GroupRow]:
    """The saved tensors that belong to no group, because they are outputs; with slots below 0."""
    saved = {storage_of(n) for n in partition.saved} - {None}
    inputs = {storage_of(n) for n in partition.forward.graph.find_nodes(op="placeholder")}
    kept = {storage_of(n) for n in partition.caller_outputs} & saved - inputs
    first = {key: nodes[0] for key, nodes in nodes_by_storage(partition.forward.graph.nodes).items() if key in kept}
    for i, node in enumerate(first.values()):
        nbytes = storage_bytes([node])
        yield GroupRow(
            graph=graph,
            slot=-1 - i,
            name=node.name,
            module=enclosing(node, options.roots)[-1],
            source=sources.get(node.name, ""),
            nbytes=nbytes,
            stored_nbytes=nbytes,
            decision="keep",
            reason=OUTPUT,
            shared="output",
        )
