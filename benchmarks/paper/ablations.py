"""What each part of ssd_fx is worth: the same training without it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import families
import torch
from training import Model, train_gpt

import ssd_fx
from paper import text
from paper.measure import Case, Result, Setup, measure_all
from paper.part import Part
from ssd_fx.passes import decide
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan

SWITCHED = """\
"no planner": everything is stored where it is made, released behind its last use, and loaded where it is used. Alias
groups cannot be switched off: views of one storage would be released one by one while others hold it. Nor can order
pins: without them Inductor ran nodes in another order than planned, and the audit refused the code. Nor can forwarding:
what is still being written has no other source. "not read back" is what it saved. What was still waiting to be written
then is not written at all, so "written" of equal plans may differ by such a tensor. A part that the planner counts also
changes the plan: without checksums a GPT recomputes nothing, and stores more. "no prefetch" has no learning either,
which would read ahead too. "no packing" changes nothing here, because no tensor of these models has gaps."""
ALL, KEEP = "all of it", "Inductor"
OPTIONS: dict[str, dict[str, Any]] = {
    "checksums": {"checksums": False},
    "prefetch": {"prefetch": 0, "adapt": False},
    "learning from steps": {"adapt": False},
    "recomputation": {"recompute": False},
    "its allocator": {"cpu_allocator": False},
}
KINDS = ("tensor", "group", "stored")
SWITCHES = {"planner": "planner", "packing": "packing", "merged copies": "copies", "whole functions": "functions"}


def _cases(setup: Setup) -> dict[str, Case]:
    width, layers = setup.shapes[0]
    found: dict[str, Case] = {}
    for family in setup.families[: 1 if setup.quick else None]:
        model = setup.model(family, width, layers)
        tasks = {KEEP: setup.plain(model), ALL: setup.ours(model, without="caches")}
        tasks |= {f"no {name}": setup.ours(model, without="caches", **options) for name, options in OPTIONS.items()}
        tasks |= {f"no {name}": setup.ours(model, without=part) for name, part in SWITCHES.items()}
        if setup.quick:
            tasks = {name: tasks[name] for name in (KEEP, ALL, "no planner")}
        found[f"{family.upper()}, width {width}, {layers} layers"] = tasks
    return found


def _measure(setup: Setup) -> Result:
    found = measure_all(setup, _cases(setup))
    width, layers = setup.shapes[0]
    found["saved"] = {family: saved(setup.model(family, width, layers)) for family in setup.families}
    return found


def saved(about: Model) -> Result:
    """Bytes of a step's saved tensors: each on its own, as alias groups, and what is written of those. Nothing runs."""
    found: Result = {}

    def noting(partition: Partition, plan: Plan) -> Plan:
        """A pass that changes nothing."""
        groups = [group for group in plan.groups if not group.obstacle]
        nodes = {node.name: node.meta["val"] for node in partition.forward.graph.nodes if "val" in node.meta}
        members = [nodes[member.name] for group in groups for member in group.members]
        alone = sum(t.numel() * t.element_size() for t in members)
        found.update(tensors=len(members), tensor_bytes=alone, groups=len(groups))
        found.update(group_bytes=sum(g.nbytes for g in groups), stored_bytes=sum(g.stored_nbytes for g in groups))
        return plan

    analyses = decide.analyses
    shape = train_gpt.Shape(about.layers, about.width, about.heads, about.seq, about.dropout)
    inputs = torch.zeros(about.batch, about.seq, dtype=torch.int64)
    model = families.make(about.family, shape, about.vocabulary)
    with mock.patch.object(decide, "analyses", lambda *rest: (*analyses(*rest), noting)):
        ssd_fx.estimate(model, (inputs, inputs), budgets=[0], options={"recompute": False}, rivals=False)
    return found


def _section(result: Result) -> str:
    parts = []
    for label, case in result["cases"].items():
        modes = case["modes"]
        rows = []
        for name, mode in modes.items():
            to_all = text.Ratio.of(mode, modes[ALL]) if ALL in modes else ""
            peak, written = text.mib(mode["peak_bytes"]), text.mib(mode["written_bytes"])
            cells = [text.mib(mode["forwarded_bytes"]), f"{1e3 * mode['stall_s']:.0f}"]
            rows.append([name, str(to_all), peak, written, *cells])
        rows += [[name, f"failed: {why}", "", "", "", ""] for name, why in case["failed"].items()]
        head = ("", "time to all of it", "live peak, MiB", "written, MiB", "not read back, MiB", "stall, ms")
        parts.append(f"**{label}**; {text.rounds(case)}.\n\n{text.table(head, rows)}")
    rows = [
        [name.upper(), str(s["tensors"]), str(s["groups"]), *(text.mib(s[f"{kind}_bytes"]) for kind in KINDS)]
        for name, s in result["saved"].items()
    ]
    head = ("", "saved tensors", "alias groups", "MiB, tensors alone", "MiB of storages", "MiB written")
    parts.append(f"Without alias groups, counted in the plan (no step runs so):\n\n{text.table(head, rows)}")
    return "\n\n".join([*parts, SWITCHED, *text.missing(result)])


PART = Part(
    name="ablations",
    title="What each part is worth",
    share=0.07,
    paper="The paper has forwarding and its adaptive keep rule, and no table of single parts that we know.",
    not_shown="One shape each. A part that is worth nothing here may be worth much in another model.",
    measure=_measure,
    section=_section,
)
