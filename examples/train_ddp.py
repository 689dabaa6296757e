"""Train a transformer with DDP, each rank with its saved activations on NVMe.

torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --dir /mnt/nvme0 --dir /mnt/nvme1

With as many directories as ranks each rank writes to one of its own; docs/runtime.md says how others are shared.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ssd_fx

VOCABULARY = 256


class Model(nn.Module):
    """Causal language model over bytes. It returns the loss, so that one graph holds the whole step."""

    def __init__(self, layers: int, width: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(seq, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(seq))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
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
    sizes = {"steps": 20, "layers": 4, "width": 256, "batch": 8, "seq": 256, "accumulate": 1}
    for name, default in sizes.items():
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
    compiled = torch.compile(model, backend=ssd_fx.backend, options=options)  # the line that changes
    parallel = DistributedDataParallel(compiled, device_ids=[device.index] if gpu else None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for step in range(flags.steps):
        for micro in range(flags.accumulate):
            last = micro == flags.accumulate - 1
            with nullcontext() if last else parallel.no_sync():
                inputs, targets = batch(step * flags.accumulate + micro, flags.batch, flags.seq, device)
                loss = parallel(inputs, targets) / flags.accumulate
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item() * flags.accumulate:.6f}", flush=True)
    if dist.get_rank() == 0:
        print(ssd_fx.stats())
    if not gpu:
        # A thread of gloo needs the GIL to let go of the last all-reduce. PyTorch 2.13 joins that thread with the GIL
        # held when the reducer dies, with or without ssd_fx.
        time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
