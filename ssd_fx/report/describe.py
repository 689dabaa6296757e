"""What a compiled graph carries about its plan, for reports: plain values that JSON takes.

    graph, budget, min_bytes, saved_bytes, offloaded_bytes
    rates       where those of the machine come from: "measured", "typical", "typical compute", "given"
    predicted   the figures of the dump
    host_speedup  as in `Forecast`
    stock       the step of PyTorch's own partition with everything kept: saved_bytes, floor_bytes, peak_bytes, step_us,
                and its memory
    memory      of the plan: [[us, bytes], ...] for the forward and for the backward, and `turn_us` between them
    whole       whether the graph has the loss: the gradients that come in are those of numbers
    groups      slot, name, module, source, nbytes, stored_nbytes, decision, tier, reason, marked, shared, life
    recomputed  name, module, source, nbytes, seconds

Times are whole microseconds from the start of the forward. `life` has those of `Life`, in its order, flat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ssd_fx.passes.cost.kernels import hint
from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint.modules import enclosing
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, nodes_by_storage, storage_of
from ssd_fx.passes.plan import Keep, Life, Offload, Plan
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
    assert plan.stock is not None, "select fills it"
    assert plan.course is not None, "select fills it"
    assert plan.forecast is not None, "select fills it"
    stock, course = plan.stock, plan.course
    return {
        "graph": plan.graph,
        "budget": options.budget,
        "min_bytes": options.min_bytes,
        "inflight": parse(options.runtime_config).inflight_bytes or LEAST_BYTES,
        "prefetch": options.prefetch,
        "rates": options.source,
        "saved_bytes": int(plan.saved_bytes),
        "offloaded_bytes": int(plan.offloaded_bytes),
        "predicted": predicted(plan),
        "host_speedup": round(plan.forecast.host_speedup, 1),
        "whole": partition.is_whole_step,
        "stock": {
            "saved_bytes": int(stock.saved_bytes),
            "floor_bytes": stock.floor,
            "peak_bytes": stock.peak,
            **_memory(stock.starts, stock.memory, stock.forward),
        },
        **_memory(course.starts, course.memory, course.forward),
        "groups": [*_groups(partition, plan, sources), *_outputs(partition, options, sources)],
        "recomputed": recomputed(plan, sources),
    }


def _groups(partition: Partition, plan: Plan, sources: Sources) -> list[dict[str, Any]]:
    assert plan.course is not None
    inputs = {storage_of(n) for n in partition.activation_inputs} - {None}
    by_name = {n.name: n for n in partition.forward.graph.nodes}
    found = []
    for group in plan.groups:
        at = storage_of(by_name[group.base])
        shared = "input" if at in inputs else ""
        life = plan.course.lives.get(group.slot)
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
                "life": [] if life is None else _flat(life),
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


def _flat(life: Life) -> list[Any]:
    return [_us(getattr(life, field.name)) for field in dataclasses.fields(life)]


def _us(at: Any) -> Any:
    if at is None:
        return None
    return [_us(each) for each in at] if isinstance(at, tuple) else round(1e6 * at)


def _memory(starts: Sequence[float], memory: Sequence[int], forward: int) -> dict[str, Any]:
    """The curve, with the highest value of each of at most `POINTS` parts of either direction."""
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
