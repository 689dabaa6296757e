"""What a compiled graph carries about its plan, for reports: plain values that JSON takes.

    graph, budget, min_bytes, saved_bytes, offloaded_bytes
    rates       where those of the machine come from: "measured", "typical", "typical compute", "given"
    predicted   the figures of the dump
    host_speedup  how many times as fast as the drives host memory would be, beside a device with memory of its own; 0
                  without one, and where there is a host budget
    stock       the step of PyTorch's own partition with everything kept: saved_bytes, floor_bytes, peak_bytes, step_us,
                and its memory
    memory      of the plan: [[us, bytes], ...] for the forward and for the backward, and `turn_us` between them
    whole       whether the graph has the loss: the gradients that come in are those of numbers
    groups      slot, name, module, source, nbytes, stored_nbytes, decision, tier, reason, marked, shared, life
    recomputed  name, module, source, nbytes, seconds

Times are whole microseconds from the start of the forward. `life` is flat: produced; read last in
the forward, first and last in the backward; begin and end of write, of read, and of the time in which its memory is
free; what the step waits for the write, and for the read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssd_fx.passes.cost.kernels import hint
from ssd_fx.passes.decide import device_of, machine_of
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint.modules import enclosing
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_of
from ssd_fx.passes.plan import Keep, Offload, Plan, replay_of
from ssd_fx.passes.schedule import Replay
from ssd_fx.report.course import thinned
from ssd_fx.report.dump import Sources, predicted, recomputed, source_lines
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.inflight import LEAST_BYTES
from ssd_fx.runtime.plans import pack

POINTS = 240  # of a curve of memory, in each direction


def about(arguments: Sequence[str], function: str, partition: Partition, plan: Plan, options: PlanOptions) -> str:
    """`describe`, packed: an argument of the graph's first node. For `Partitioner.about`."""
    return pack(describe(partition, plan, options, arguments, function))


def describe(
    partition: Partition, plan: Plan, options: PlanOptions, arguments: Sequence[str] = (), function: str = ""
) -> dict[str, Any]:
    """The plan of a partition that is not rewritten yet.

    arguments: the names of the Dynamo graph's inputs. function: what they are the arguments of.
    """
    found = source_lines(partition, arguments)
    of = f" of {function}" if function else ""
    sources = {name: f"{line}{of}" if line.startswith("argument ") else line for name, line in found.items()}
    baseline = plan.origin.baseline
    assert baseline is not None, "select fills it"
    return {
        "graph": plan.graph,
        "budget": options.budget,
        "min_bytes": options.min_bytes,
        "inflight": parse(options.runtime_config).inflight or LEAST_BYTES,
        "prefetch": options.prefetch,
        "rates": options.rates,
        "saved_bytes": int(plan.saved_bytes),
        "offloaded_bytes": int(plan.offloaded_bytes),
        "predicted": predicted(plan),
        "host_speedup": round(_host_speedup(partition, options), 1),
        "whole": partition.is_whole_step,
        "stock": {
            "saved_bytes": int(plan.origin.saved_bytes),
            "floor_bytes": baseline.step.floor,
            "peak_bytes": baseline.peak,
            **_memory(baseline),
        },
        **_memory(replay_of(plan)),
        "groups": [*_groups(partition, plan, sources), *_outputs(partition, options, sources)],
        "recomputed": recomputed(plan, sources),
    }


def _groups(partition: Partition, plan: Plan, sources: Sources) -> list[dict[str, Any]]:
    inputs = {storage_of(n) for n in partition.activation_inputs} - {None}
    by_name = {n.name: n for n in partition.forward.graph.nodes}
    found = []
    for group in plan.groups:
        at = storage_of(by_name[group.base])
        shared = "input" if at in inputs else ""
        found.append(
            {
                "slot": group.slot,
                "name": group.base,
                "module": plan.modules.get(group.slot, ""),
                "source": sources.get(group.base, ""),
                "nbytes": int(group.nbytes),
                "stored_nbytes": int(group.stored_nbytes),
                **_decided(plan, group),
                "shared": shared,
                "life": _life(plan, group.slot) if group.slot in plan.items else [],
            }
        )
    return found


OUTPUT = "an output of the graph, which the caller gets"


def _outputs(partition: Partition, options: PlanOptions, sources: Sources) -> list[dict[str, Any]]:
    """The saved tensors that are no group's, because they are outputs; with slots below 0."""
    saved = {storage_of(n) for n in partition.saved} - {None}
    inputs = {storage_of(n) for n in partition.forward.graph.find_nodes(op="placeholder")}
    kept = {storage_of(n) for n in partition.caller_outputs} & saved - inputs
    first = {key: nodes[0] for key, nodes in nodes_by_storage(partition.forward.graph.nodes).items() if key in kept}
    return [
        {
            "slot": -1 - i,
            "name": node.name,
            "module": enclosing(node, options.roots)[-1],
            "source": sources.get(node.name, ""),
            "nbytes": (nbytes := int(hint(node.meta["val"].untyped_storage().nbytes()))),
            "stored_nbytes": nbytes,
            "decision": "keep",
            "tier": "",
            "reason": OUTPUT,
            "marked": False,
            "shared": "output",
            "life": [],
        }
        for i, node in enumerate(first.values())
    ]


def _decided(plan: Plan, group: AliasGroup) -> dict[str, Any]:
    decision, mark = plan.decisions[group.slot], plan.marks.get(group.slot)
    if isinstance(decision, Keep):
        return {"decision": "keep", "tier": "", "reason": decision.reason, "marked": mark is not None}
    assert isinstance(decision, Offload), "the partition that recomputes does not save what it recomputes"
    reason = "" if mark is None else mark.reason
    return {"decision": "offload", "tier": decision.tier, "reason": reason, "marked": mark is not None}


def _host_speedup(partition: Partition, options: PlanOptions) -> float:
    if device_of(partition).type == "cpu" or options.host_budget:
        return 0.0
    machine = machine_of(partition, options)
    return machine.lanes("host").write_bw / machine.write_bw


def _life(plan: Plan, slot: int) -> list[Any]:
    times = plan.times(slot)
    (released, until), (waited, used) = times["release"], times["wait"]
    spans = (times.get(kind) for kind in ("write", "read", "gone"))
    found = (times["store"][0], released, used, times["last"][0], *spans, until - released, used - waited)
    return [_us(each) for each in found]


def _us(at: Any) -> Any:
    if at is None:
        return None
    return [_us(each) for each in at] if isinstance(at, tuple) else round(1e6 * at)


def _memory(replay: Replay) -> dict[str, Any]:
    """The curve, with the highest value of each of at most `POINTS` parts of either direction."""
    starts, memory, forward = replay.starts, replay.memory, replay.step.forward
    return {
        "turn_us": _us(starts[forward]),
        "step_us": _us(starts[-1]),
        "forward": _curve(starts[:forward], memory[:forward]),
        "backward": _curve(starts[forward:-1], memory[forward:]),
    }


def _curve(starts: Sequence[float], memory: Sequence[int]) -> list[list[int]]:
    """Where it is level, the first point alone."""
    points = thinned([*zip(starts, map(int, memory), strict=True)], POINTS)
    return [[_us(at), nbytes] for i, (at, nbytes) in enumerate(points) if not i or points[i - 1][1] != nbytes]
