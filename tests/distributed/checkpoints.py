"""One rank that trains FSDP2 with a checkpoint around every block: PyTorch's, and then ours.

torchrun --standalone --nproc-per-node 2 -m tests.distributed.checkpoints DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import ssd_fx
from tests.bitwise import differences, run
from tests.distributed.model import Net, batch, loss_of
from tests.distributed.worker import local

STEPS = 3


def train(how: Callable[..., Any]) -> list[Tensor]:
    """Losses and gradients, as torchtitan wraps its blocks: the checkpoint inside, FSDP2 outside."""
    model, seen = Net(), list[Tensor]()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block, checkpoint_fn=how, preserve_rng_state=True)
        fully_shard(model.blocks[i])
    fully_shard(model)
    for step in range(STEPS):
        tokens, targets = batch(1000 * dist.get_rank() + step)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        seen += [loss.detach(), *(local(p.grad).clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return seen


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    options = {"dirs": [directory], "min_bytes": 0, "allow_tmpfs": True, "budget": 0}
    ways = (partial(checkpoint, use_reentrant=False), partial(ssd_fx.checkpoint, options=options))
    expected, found = (run(train, how) for how in ways)
    same = differences(found, expected) == {}
    stats = ssd_fx.stats()
    print(f"rank {dist.get_rank()}: same {same}, {stats.stores} stores, {stats.loads} loads", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
