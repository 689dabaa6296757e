"""Train a transformer with FSDP2: parameters sharded over the ranks, each with its saved activations on NVMe.

torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --dir /mnt/nvme0 --dir /mnt/nvme1

Every block is a graph of its own, since FSDP2 gathers and frees its parameters between them. The hidden states that go
from block to block leave with the rest, and the activations of one block are read while the next one's backward runs.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ssd_fx

VOCABULARY = 256


class Block(nn.Module):
    """Pre-LayerNorm transformer block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Model(nn.Module):
    """Causal language model over bytes."""

    def __init__(self, layers: int, width: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int, size: int, seq: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes that count upwards from random starts, other ones on every rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(VOCABULARY, (size, 1), generator=generator)
    window = ((starts + torch.arange(seq + 1)) % VOCABULARY).to(device)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", action="append", help="a directory on a drive; may be given several times")
    parser.add_argument(
        "--budget", default="0", help="saved bytes that each rank may keep in memory, or a share of them"
    )
    parser.add_argument("--bf16", action="store_true", help="compute and gather in bfloat16")
    for name, default in {"steps": 20, "layers": 4, "width": 256, "batch": 8, "seq": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    model = Model(flags.layers, flags.width, flags.seq).to(device)
    options: dict[str, Any] = {"budget": flags.budget} | ({"dirs": flags.dir} if flags.dir else {})
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32) if flags.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        block.compile(backend=ssd_fx.backend, options=options)  # the line that changes
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(flags.steps):
        loss = model(*batch(step, flags.batch, flags.seq, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
    if dist.get_rank() == 0:
        print(ssd_fx.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
