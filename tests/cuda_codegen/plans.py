"""What is planned for a GPT on a GPU, without one: the rates are those that a GPU was measured to have.

python -m tests.cuda_codegen.plans --machine docs/results/gpu/2026-11-27-nvidia-h200-machine-1b439be.json
python -m tests.cuda_codegen.plans --machine FILE --layers 6 --width 4096 --heads 32 --batch 16 --budgets auto 0.5 0

The model is in bfloat16, with flash attention. What is offloaded goes to host memory (engine "memory"). FILE is the
cache that `ssd-fx calibrate` writes. "of code" is the peak of the generated code (`walk.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from examples.train_gpt import GPT, Shape
from tests.cuda_codegen import pretend
from tests.cuda_codegen.models import Flash
from tests.cuda_codegen.process import pretending
from tests.cuda_codegen.walk import walked
from tests.passes.lowered import lower

GIB = 2**30
COLUMNS = (
    "budget",
    "saved GiB",
    "offloaded",
    "step ms",
    "of compute",
    "stalls ms",
    "peak GiB",
    "of code GiB",
    "kept GiB",
    "floor GiB",
)


def rates(path: Path) -> dict[str, Any]:
    """The option `machine`, of a machine whose tier of host memory is all that there is.

    `path`: a cache of the calibration, of today's format or of one of its first ones.
    """
    found = json.loads(path.read_text())
    if "measured" in found:
        measured = {name: each["rates"] for name, each in found["measured"].items()}
    else:
        measured = {f"{kind} {name}": of for kind in ("compute", "disk") for name, of in found[kind].items()}
    compute = next(of for name, of in measured.items() if name.startswith("compute"))
    disk = next(of for name, of in measured.items() if name.startswith("disk"))
    disk = next((of for name, of in measured.items() if '"engine": "memory"' in name), disk)
    lanes = {"write_bw": compute["to_host_bw"], "read_bw": compute["from_host_bw"]}
    return {**compute, **disk, **lanes, "latency_s": compute["host_latency_s"], "drag_s_per_byte": 0.0}


def planned(flags: argparse.Namespace, budget: str) -> dict[str, Any]:
    """What `<graph>.plan.json` has, and the peak of the code in bytes as `walked`."""
    shape = Shape(flags.layers, flags.width, flags.heads, flags.seq, 0.1)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), tempfile.TemporaryDirectory() as scratch:
        torch.set_default_dtype(torch.bfloat16)
        model = GPT(shape)
        torch.set_default_dtype(torch.float32)
        for block in model.blocks:
            block.attention = Flash(block.attention)
        pretend.move(model)
        inputs = [torch.empty(flags.batch, flags.seq, dtype=torch.int64, device=pretend.DEVICE) for _ in range(2)]
        options = {"machine": json.dumps(rates(flags.machine)), "budget": budget, "dump": scratch, "min_bytes": 2**20}
        graphs = lower(model, *inputs, options=options, joint_graph_constant_folding=False)
        (path,) = Path(scratch).glob("*.plan.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found | {"walked": walked(*graphs)}


def row(budget: str, plan: dict[str, Any]) -> str:
    of = plan["predicted"]
    saved = sum(group["nbytes"] for group in plan["groups"])
    gone = sum(group["nbytes"] for group in plan["groups"] if group["decision"].startswith("offload"))
    cells = [budget, f"{saved / GIB:.2f}", f"{gone / saved:.1%}", f"{of['step_s'] * 1e3:.1f}"]
    cells += [f"{of['step_s'] / of['compute_s']:.3f}", f"{(of['write_stall_s'] + of['read_stall_s']) * 1e3:.1f}"]
    peaks = (of["peak_bytes"], plan["walked"], of["kept_peak_bytes"], of["floor_bytes"])
    cells += [f"{nbytes / GIB:.3f}" for nbytes in peaks]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True, metavar="FILE")
    for name, default in (("layers", 2), ("width", 12288), ("heads", 96), ("batch", 12), ("seq", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--budgets", nargs="+", default=["auto", "0"], metavar="BUDGET")
    parser.add_argument("--pretending", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if not flags.pretending:
        print(*pretending("tests.cuda_codegen.plans", [*sys.argv[1:], "--pretending"], os.environ), sep="\n")
        return
    pretend.device()
    torch.set_float32_matmul_precision("high")  # else Inductor warns
    print(f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), sep="\n")
    for budget in flags.budgets:
        print(row(budget, planned(flags, budget)), flush=True)


if __name__ == "__main__":
    main()
