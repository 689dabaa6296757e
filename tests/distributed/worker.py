"""One rank that trains in some modes, with and without offload, and writes down how they compare.

torchrun --standalone --nproc-per-node 2 -m tests.distributed.worker OUT INNER MODE...
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import ssd_fx
from tests.bitwise import Compile, differences, kept, ours, run, stock
from tests.distributed.modes import MODES
from tests.passes.recomputing import SLOW
from tests.zoo.trial import near

STEPS, RATE = 2, 0.1
UNLIKE = ", ranks with unlike plans"  # behind the name of a mode
AGREED = ", ranks that agree on what is saved"
FAST = SLOW | {"write_bw": 1e12, "read_bw": 1e12, "latency_s": 0.0}
PATIENCE = timedelta(minutes=5)  # for the other ranks, whose plans may take longer on a busy machine


@dataclass(frozen=True)
class Found:
    """What one rank says of one mode; bytes of all steps. `near_plain`: whether Inductor computes about the same."""

    mode: str
    inner: str
    rank: int
    difference: float
    near_plain: bool
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    read_bytes: int
    stores: int
    recomputed: int
    graphs: int
    graph_breaks: int
    values: int
    seconds: float


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def train(mode: str, compile: Compile) -> dict[str, Tensor]:
    """A program of `tests/bitwise.py`: losses and gradients of every step, by name."""
    torch._dynamo.utils.counters.clear()
    torch._dynamo.config.optimize_ddp = True
    model, step = MODES[mode](compile.keywords)  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    values = {}
    for number in range(STEPS):
        for i, loss in enumerate(step(number)):
            values[f"{number} loss {i}"] = local(loss.detach()).reshape(1).clone()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            values[f"{number} {name}"] = local(parameter.grad).detach().clone().contiguous()
        optimizer.step()
        optimizer.zero_grad()
    return values


def compare(name: str, inner: str, directory: str) -> Found:
    """Of everything kept and everything offloaded; with `UNLIKE` every rank plans otherwise."""
    started = time.perf_counter()
    mode, unlike = name.removesuffix(UNLIKE).removesuffix(AGREED), name not in MODES
    dump = f"{directory}/{name}".replace(" ", "_")
    options = {"dirs": [directory], "min_bytes": 0, "budget": 0.0, "recompute": False, "inner": inner, "dump": dump}
    if unlike:
        options |= {"budget": 0.5, "recompute": True, "machine": FAST if dist.get_rank() else SLOW}
    program = partial(train, mode)
    expected = run(program, kept(options, dump=""))
    agreed = name.endswith(AGREED)  # PyTorch then asks how large all is that is saved, meshes of DTensors included
    agree = {"_sync_decision_cross_ranks": True, "unsafe_treat_script_objects_as_zero_size": True} if agreed else {}
    with torch._functorch.config.patch(**agree):  # torch 2.11 knows the first alone
        found, stats = run(program, ours(options)), ssd_fx.stats()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    sizes = (stats.saved_bytes, stats.offloaded_bytes, stats.written_bytes, stats.read_bytes)
    counts = (stats.stores, recomputed(Path(dump)), len(stats.graphs), breaks, len(found))
    seconds = time.perf_counter() - started
    near_plain = inner != "inductor" or near(expected, run(program, stock("inductor")))
    apart = max(differences(found, expected).values(), default=0.0)
    return Found(name, inner, dist.get_rank(), apart, near_plain, *sizes, *counts, seconds)


def recomputed(dump: Path) -> int:
    """How many tensors this rank's plans compute again."""
    plans = (dump / f"rank{dist.get_rank()}").glob("*.plan.json")
    return sum(len(json.loads(plan.read_text())["recomputed"]) for plan in plans)


def main() -> None:
    out, inner, *modes = sys.argv[1:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    for mode in modes:
        found = compare(mode, inner, out)
        with open(Path(out) / f"rank{found.rank}.jsonl", "a") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
