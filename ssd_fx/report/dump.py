"""A compiled graph as text: its code, and its plan as one table that serves users, bug reports and golden tests.

Fixed columns, in the order of definition; modules, and lines of the model, where they are known. `>` means after, `<`
before:

    relu    mlp  gpt.py:57  256 B  offload    store>relu release>mul load<mm_3 wait<mul_1  [relu, detach, view]
    sin     mlp  gpt.py:58  256 B  keep       below min_bytes                              [sin]
    gelu    mlp  gpt.py:59  256 B  recompute  0.0132 ms

Equal layers are folded (`rows.py`); `plan.json` has them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.partition import Names, Partition
from ssd_fx.passes.plan import Plan
from ssd_fx.report.describe import Sources, decided, predicted, recomputed, source_lines
from ssd_fx.report.rows import Row, aligned, fold
from ssd_fx.runtime.wear import digits
from ssd_fx.sizes import format_bytes

NO_SOURCES: Sources = {}
_NO_STAGES: Mapping[str, str] = {}
# The plan; reports show it elsewhere.
_ABOUT = re.compile(r"((?:ssd_fx_ops\.begin_|ssd_fx\.begin_\.default)\(.*), '[\w=-]{100,}'(?:, \d+)?\)")
_CALL = re.compile(r"^.*\b(?:ssd_fx_ops|torch\.ops\.ssd_fx)\.(\w+?)_?(?:\.default)?\(.*$", re.MULTILINE)
_WORDS = {"wait_store": "release", "wait_load": "wait", "begin": "begin"}  # the nodes by their names in plans


def table(plan: Plan, names: Names, sources: Sources = NO_SOURCES) -> str:
    """A head, one line per alias group and per recomputed tensor, and the predictions.

    names: `node_names`, taken before insertion.
    """
    again = (
        Row(r["name"], r["module"], format_bytes(r["nbytes"]), "recompute", _price(r["seconds"]), source=r["source"])
        for r in recomputed(plan, sources)
    )
    rows = [*fold(_row(plan, g, names, sources) for g in plan.groups), *fold(again)]
    return "\n".join([head(plan), *aligned([row.cells for row in rows], {Row.SIZE}), *_predicted(plan)]) + "\n"


def head(plan: Plan) -> str:
    """The plan in a line."""
    share = 100 * plan.offloaded_bytes / plan.saved_bytes if plan.saved_bytes else 0.0
    text = (
        f"graph {plan.graph}: {len(plan.groups)} alias groups, {format_bytes(plan.saved_bytes)} saved, "
        f"{len(plan.offloaded)} groups and {format_bytes(plan.offloaded_bytes)} offloaded ({share:.1f}%)"
    )
    if plan.recomputed:
        again = format_bytes(sum(r.nbytes for r in plan.recomputed))
        text += f", {len(plan.recomputed)} tensors and {again} recomputed"
    return text


def _predicted(plan: Plan) -> list[str]:
    figures = predicted(plan)
    sizes = {name: format_bytes(figure) for name, figure in figures.items() if name.endswith("_bytes")}
    ms = {name: digits(1e3 * figure, 4) for name, figure in figures.items() if name.endswith("_s")}
    return [
        f"predicted step {ms['step_s']} ms: compute {ms['compute_s']}, starting transfers and computing beside them "
        f"{ms['transfer_s']}, waiting for writes {ms['write_stall_s']}, for reads {ms['read_stall_s']}",
        f"predicted peak {sizes['peak_bytes']} of {sizes['limit_bytes']} allowed; "
        f"floor (infinitely fast I/O) {sizes['floor_bytes']}, everything kept {sizes['kept_peak_bytes']}",
        *_before_recomputing(plan),
        *_resident(sizes),
    ]


def _before_recomputing(plan: Plan) -> list[str]:
    """A line with the figures from which the limit follows, if they are not those of this partition."""
    if not plan.recomputed:
        return []
    baseline = plan.origin.baseline
    assert baseline is not None, "select fills it"
    least, most = format_bytes(baseline.step.floor), format_bytes(baseline.peak)
    return [f"allowed is of PyTorch's own partition, which recomputes less: floor {least}, everything kept {most}"]


def _resident(sizes: dict[str, str]) -> list[str]:
    """Lines about what else is in memory. A budget in bytes is over all graphs, so only run time shows what stays."""
    found = []
    if much := sizes.get("shared_budget_bytes"):
        stays = f"up to {much} of what is offloaded stay in memory at run time, the latest of all graphs"
        found.append(f"{stays}; this plan counts on none of it")
    if much := sizes.get("host_budget_bytes"):
        found.append(f"predicted host memory {sizes['host_peak_bytes']} of {much} allowed")
    if much := sizes.get("resident_bytes"):
        found.append(f"host memory is this device's: the runtime keeps up to {much} resident beyond that peak")
    return found


def _row(plan: Plan, group: AliasGroup, names: Names, sources: Sources) -> Row:
    row = decided(plan, group, sources)
    where = " ".join(f"{name}{at}" for name, at in _points(plan, group, names).items())
    members = tuple(m.name for m in group.members)
    return Row(row.name, row.module, _size(group), row.what, row.reason, where, members, source=row.source)


def _size(group: AliasGroup) -> str:
    """`512 B`, or `256 of 512 B` where only a part is stored."""
    whole = format_bytes(group.nbytes)
    if group.stored_nbytes == group.nbytes:
        return whole
    unit = whole.partition(" ")[2]
    return f"{format_bytes(group.stored_nbytes).removesuffix(f' {unit}')} of {whole}"


def _points(plan: Plan, group: AliasGroup, names: Names) -> dict[str, str]:
    """The nodes of the model behind (`>`) or before (`<`) which our nodes of a group stand; empty if it is kept."""
    trip, (forward, backward) = plan.schedule.get(group.slot), names
    if trip is None:
        return {}
    at = [*forward, *backward]
    return {
        "store>": at[trip.store.at],
        "release>": at[trip.release.at],
        "load<": at[trip.load.at],
        "wait<": at[trip.wait.at],
        **({"later": ""} if trip.is_later else {}),
    }


def _price(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


LEGEND = """
# One row per alias group, a storage that is saved: its base, its module, its line in the model or its argument, its
# bytes, the decision, the nodes or the reason, [the saved tensors that are views of it]. "{0..3} x 4": the rows of four
# equal layers.
# Sizes are exact below a MiB. The .plan.json has exact bytes, every layer, and the slots that messages and traces use.
# store>, release>: the forward node behind which the write starts, and behind which the forward reads it no more.
# later: the write starts only if another forward begins before the load.
# load<, wait<: the backward node before which the read starts, and before which it has ended.
# floor: the peak if everything that can be offloaded were gone at once. allowed: the floor, and for a share its part of
# the bytes between floor and everything kept, for a budget in bytes so many more, all before anything is recomputed.
# For budget 0: the lowest that can be met, or up to 5% more where the step is a tenth shorter.
# Predictions use the option machine.
"""


@dataclass(frozen=True)
class Explanation:
    """One compiled graph, as the option `dump` writes it.

    Attributes:
        graph: its name in stats, logs and traces.
        table: the plan, for people.
        plan: the same in full, with the keys `saved_bytes`, `offloaded_bytes`, `predicted`, `groups` and `recomputed`.
        forward: the code of the forward, with stores and releases.
        backward: the code of the backward, with loads and waits.
        stages: the code of all graphs by the pass that has changed it, from the joint graph to what Inductor gets.
        about: the plan as the graph carries it for reports, packed; no file has it.
    """

    graph: str
    table: str
    plan: Mapping[str, Any]
    forward: str
    backward: str
    stages: Mapping[str, str] = field(default_factory=dict)
    about: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.table

    def files(self) -> dict[str, str]:
        """The texts by the names of their files."""
        return {
            f"{self.graph}.plan.txt": self.table,
            f"{self.graph}.plan.json": json.dumps(self.plan, indent=1) + "\n",
            f"{self.graph}.forward.py": self.forward,
            f"{self.graph}.backward.py": self.backward,
            **{f"{self.graph}/{i:02}_{name}.txt": code for i, (name, code) in enumerate(self.stages.items())},
        }


def dump(
    partition: Partition,
    plan: Plan,
    names: Names,
    arguments: Sequence[str] = (),
    stages: Mapping[str, str] = _NO_STAGES,
) -> Explanation:
    """What there is to see of a rewritten graph.

    names: `node_names` before insertion.
    arguments: the names of the Dynamo graph's inputs, in order.
    """
    config = configuration(partition.forward.graph)
    sources = source_lines(partition, arguments)
    return Explanation(
        plan.graph,
        table(plan, names, sources) + LEGEND,
        details(plan, names, sources),
        told_once(partition.forward.print_readable(print_output=False), config),
        partition.backward.print_readable(print_output=False),
        {name: told_once(code, config) for name, code in stages.items()},
    )


def details(plan: Plan, names: Names, sources: Sources) -> dict[str, Any]:
    """The contents of the table, with every layer."""
    groups = []
    for group in plan.groups:
        row = decided(plan, group, sources)
        found: dict[str, object] = {
            name: getattr(row, name) for name in ("slot", "name", "module", "source", "nbytes", "stored_nbytes")
        }
        found |= {"decision": row.what, "reason": row.reason, "members": [m.name for m in group.members]}
        groups.append(found | {name.rstrip("<>"): at or True for name, at in _points(plan, group, names).items()})
    totals = {"graph": plan.graph, "saved_bytes": plan.saved_bytes, "offloaded_bytes": plan.offloaded_bytes}
    return totals | {"predicted": predicted(plan), "groups": groups, "recomputed": recomputed(plan, sources)}


def configuration(graph: fx.Graph) -> str:
    """The runtime's options as the nodes of a forward have them; "" in a graph without our nodes."""
    begin = next(iter(graph.find_nodes(op="call_function", target=torch.ops.ssd_fx.begin_.default)), None)
    return str(begin.args[1]) if begin is not None else ""


def told_once(code: str, config: str) -> str:
    """`code` with the name CONFIG wherever it has the text `config`, which a line at the top gives.

    The plan that the first node carries for reports is left out.
    """
    code = _ABOUT.sub(r"\1)", code)
    quoted = repr(config)
    if not config or quoted not in code:
        return code
    return f"CONFIG = {quoted}\n\n{code.lstrip().replace(quoted, 'CONFIG')}"


def marked(code: str) -> str:
    """Generated `code` with a mark behind every line that calls us."""
    return _CALL.sub(lambda line: f"{line[0]}  # <-- ssd_fx: {_WORDS.get(line[1], line[1])}", code)
