"""One rank that trains under DeepSpeed's ZeRO, with everything kept and with everything on disk.

DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 -m tests.ways.zero_rank DIRECTORY STAGE
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import ssd_fx
from tests.loops.loops import Net, batch

STEPS = 3


def train(stage: int, options: dict[str, Any]) -> list[Tensor]:
    """Losses, and the parameters at the end, gathered."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(blocks=3)
    config = {"train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    engine.compile(backend="ssd_fx", compile_kwargs={"options": options})
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = engine(batch(10 * dist.get_rank() + step))
        engine.backward(loss)
        engine.step()
        seen.append(loss.detach().clone())
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return [*seen, *(p.detach().clone() for p in model.parameters())]


def main(directory: str, stage: str) -> None:
    deepspeed.init_distributed("gloo")
    torch.use_deterministic_algorithms(True)
    options = {"dirs": [directory], "inner": "aot_eager", "budget": 0, "min_bytes": 0, "recompute": False}
    kept = train(int(stage), options | {"budget": 1.0})
    ssd_fx.reset_stats()
    found = train(int(stage), options)
    same = all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
    stats = ssd_fx.stats()
    said = f"same {same}, {len(found)} values, {stats.stores} stores, {stats.loads} loads"
    print(f"rank {dist.get_rank()}: {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
