"""One rank of a DistributedDataParallel job whose ranks share a device, over gloo.

torchrun --standalone --nproc-per-node 2 -m tests.gpu.ranks DEVICE ENGINE DIRECTORY

The last line of rank 0 is JSON: a digest of losses and gradients, and the bytes that were offloaded.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

import ssd_fx
from examples.train_gpt import GPT, Shape
from tests.bitwise import deterministic
from tests.models import batch
from tests.rates import QUICK

SMALL = Shape(layers=2, width=128, heads=2, seq=128, dropout=0.0)
STEPS = 3


def main(device: str, engine: str, directory: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(SMALL).to(device))
    options = {"dirs": [directory], "engine": engine, "allow_tmpfs": True, "min_bytes": 0, "budget": 0}
    options["machine"] = QUICK
    step = torch.compile(model, backend=ssd_fx.backend, options=options)
    inputs, targets = (x.to(device) for x in batch(SMALL))
    seen = hashlib.sha256()
    for _ in range(STEPS):
        loss = step(inputs.roll(dist.get_rank(), 0), targets)
        loss.backward()
        for x in (loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)):
            seen.update(x.cpu().numpy().tobytes())
        model.zero_grad()
    if dist.get_rank() == 0:
        print(json.dumps({"digest": seen.hexdigest(), "offloaded_bytes": ssd_fx.stats().offloaded_bytes}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with deterministic(), sdpa_kernel(SDPBackend.MATH):
        main(*sys.argv[1:])
