"""One rank that trains torchtitan's Llama as torchtitan does: checkpoints, blocks compiled, then its `apply_fsdp`.

torchrun --standalone --nproc-per-node 2 -m tests.ways.titan_rank DIRECTORY CHECKPOINT
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torchtitan.models.llama3.infra.parallelize import apply_fsdp

from tests.bitwise import Compile, by_name
from tests.distributed.worker import local
from tests.ways.test_torchtitan import llama, tokens
from tests.ways.ways import compare_on_a_rank

STEPS = 2


def train(checkpoint: str, compile: Compile) -> list[Tensor]:
    """Losses and this rank's gradients."""
    torch._dynamo.reset()
    model, seen = llama(checkpoint, compile), list[Tensor]()
    full = torch.float32
    apply_fsdp(model, init_device_mesh("cpu", (dist.get_world_size(),)), full, full, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds up
    with by_name(compile):
        for step in range(STEPS):
            batch = tokens(10 * dist.get_rank() + step)
            loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            loss.backward()
            seen += [loss.detach(), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
    return seen


def main(directory: str, checkpoint: str) -> None:
    dist.init_process_group("gloo")
    compare_on_a_rank(partial(train, checkpoint), directory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
