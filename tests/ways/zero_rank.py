"""One rank that trains under DeepSpeed's ZeRO, with everything kept and with everything on disk.

DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 -m tests.ways.zero_rank DIRECTORY STAGE
"""

from __future__ import annotations

import sys
from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bitwise import Compile
from tests.loops.loops import Net, batch
from tests.ways.ways import compare_on_a_rank

STEPS = 3


def train(stage: int, compile: Compile) -> list[Tensor]:
    """Losses, and the parameters at the end, gathered."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(blocks=3)
    config = {"train_micro_batch_size_per_gpu": 64, "zero_optimization": {"stage": stage}}
    config |= {"zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    how = compile.keywords  # type: ignore[attr-defined]
    engine.compile(backend=how["backend"], compile_kwargs={"options": how["options"]})
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
    compare_on_a_rank(partial(train, int(stage)), directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
