"""Generates the code of cases and prints, for each and each backend, a line of JSON: a `Generated`.

python -m tests.cuda_codegen.generate [--code DIR] CASE...     # started by process.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ssd_fx.passes import decide
from ssd_fx.passes.cost import roofline
from ssd_fx.passes.lowering import audit
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan
from tests.cuda_codegen import pretend
from tests.cuda_codegen.code import count
from tests.cuda_codegen.models import CASES, DYNAMIC
from tests.cuda_codegen.walk import walked
from tests.passes.lowered import lower
from tests.rates import QUICK

OPTIONS: dict[str, dict[str, Any] | None] = {"inductor": None, "ssd_fx": {"machine": QUICK, "recompute": False}}


def generate(name: str, backend: str, directory: Path | None) -> dict[str, Any]:
    """Both graphs of a case, counted; the code goes into the directory."""
    model, inputs = CASES[name]()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    launches = [0]

    def time(partition: Partition, plan: Plan, **more: Any) -> Plan:
        timed = roofline.time(partition, plan, **more)
        gradients = partition.backward.graph.output_node().all_input_nodes
        launches.append(timed.launches.step - len(gradients))
        return timed

    audits = mock.patch.object(audit, "audit_lines", wraps=audit.audit_lines)
    with mode, mock.patch.object(decide, "time", time), audits as audited, tempfile.TemporaryDirectory() as dumped:
        pretend.move(model)
        # Folding constants would compute them on the device, and padding, with Triton installed, would measure there.
        moved = [torch.empty_like(x, device=pretend.DEVICE) for x in inputs]
        patches: dict[str, Any] = {"joint_graph_constant_folding": False, "shape_padding": False}
        options = OPTIONS[backend] and {**OPTIONS[backend], "dump": dumped}
        graphs = lower(model, *moved, options=options, dynamic=name in DYNAMIC, **patches)
        found = {"case": name, "backend": backend, "audited": audited.call_count, "launches": launches[-1]}
        found["walked"] = 0 if name in DYNAMIC else walked(*graphs)
        predicted = [json.loads(path.read_text())["predicted"] for path in Path(dumped).glob("*.plan.json")]
        found["peak"] = sum(of["peak_bytes"] for of in predicted)
    for half, graph in zip(("forward", "backward"), graphs, strict=True):
        found[half] = asdict(count(graph.code))
        if directory is not None:
            (directory / f"{name} {backend} {half}.py".replace(" ", "_")).write_text(graph.code)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--code", type=Path)
    flags = parser.parse_args()
    pretend.device()
    torch.set_float32_matmul_precision("high")  # else Inductor warns
    for name in flags.cases:
        for backend in OPTIONS:
            print(json.dumps(generate(name, backend, flags.code)), flush=True)


if __name__ == "__main__":
    main()
