"""One rank that trains a step, says what it has of its node, measures in its turn, and may die in its next step.

torchrun --standalone --nproc-per-node 2 -m tests.distributed.node OUT DIRECTORY...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ssd_fx
from ssd_fx.calibration import calibrate, rates, timing, transfers
from ssd_fx.options import Options
from tests.distributed.model import Net, batch, loss_of

MEASURES_S = 0.5
DYING = 1  # the rank that does


def open_files(under: Path) -> dict[str, int]:
    """Bytes of the files of this process that have no name, by the directory that they are in."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target, status = os.readlink(link), link.stat()
        except FileNotFoundError:  # the descriptor that lists them
            continue
        if target.startswith(str(under)) and target.endswith(" (deleted)") and status.st_nlink == 0:
            found[os.path.dirname(target)] = status.st_size
    return found


def measured(out: Path, directory: str, cache: str) -> list[tuple[float, float]]:
    """When this process measured, with a cache directory that may be of no use; measuring itself is replaced."""
    spans: list[tuple[float, float]] = []

    def measure(kind: str, found: Any) -> Any:
        started = time.monotonic()
        time.sleep(MEASURES_S)
        spans.append((started, time.monotonic()))
        return found

    rates.Compute.rates = lambda self: measure("compute", {"flops": 2e11, "kernel_s": 1e-5})  # type: ignore[method-assign]
    disk = {"write_bw": 1.5e9, "read_bw": 1e9, "latency_s": 1e-4, "drag_s_per_byte": 0.0}
    transfers.Transfers.rates = lambda self: measure("disk", disk)  # type: ignore[method-assign]
    calibrate.node_s = lambda config, device: 1e-4
    timing.Others.share = lambda self: 0.0  # the other ranks are at work
    os.environ["XDG_CACHE_HOME"] = str(out / cache)
    calibrate._known.clear()  # this process has read or measured nothing
    dist.barrier()
    calibrate.calibrated(Options(dirs=(directory,), engine="posix"), torch.device("cpu"))
    return spans


def main() -> None:
    out, directories = Path(sys.argv[1]), sys.argv[2:]
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    options = {"dirs": directories, "min_bytes": 0, "inner": "aot_eager", "dump": str(out / "dump")}
    model = Net(blocks=1)
    run = DistributedDataParallel(torch.compile(model, backend=ssd_fx.backend, options=options))
    tokens, targets = batch(rank)
    loss_of(run(tokens), targets).backward()
    stats = ssd_fx.stats()
    left = stats.written_bytes + stats.cancelled_bytes  # cancelled: wanted before it was written
    said = {"pid": os.getpid(), "files": open_files(out), "left": left}
    said["kept"] = measured(out, directories[0], "cache")
    said["unkept"] = measured(out, directories[0], "no_directory")
    loss = loss_of(run(tokens), targets)
    said["stored"] = ssd_fx.stats().stores
    (out / f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    if rank == DYING:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()  # waits for the gradients of the one that is dead
    raise AssertionError("a rank is dead, and its gradients came")


if __name__ == "__main__":
    main()
