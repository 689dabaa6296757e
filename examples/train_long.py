"""Train layers of a Llama on one long row within a limit of memory.

python examples/train_long.py --dir /mnt/nvme --memory 400MiB    # narrow layers, on the CPU
python examples/train_long.py --dir /mnt/nvme --memory 60GiB --device cuda --tokens 65536 --width 4096 --heads 32 \
    --vocabulary 128256                                          # layers of Llama 3's 8B
python examples/train_long.py --backend inductor                 # the same training without ssd_fx

The loss is in pieces, so that the logits of a few tokens exist at once: at long rows all of them would be the largest
tensor of the step. At the end the report says what the step took, and what is alive at its peak.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train_gpt import Shape

GROUPED = 4  # heads of queries for one of keys and values, as in Llama 3
PIECE = 2048  # tokens whose logits exist at once


class Rotated(nn.Module):
    """Llama's attention: causal, with grouped queries and positions that rotate queries and keys.

    On the CPU, whose fused kernel knows no groups, keys and values are repeated for all queries of a group.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.grouped = GROUPED if shape.heads % GROUPED == 0 else 1
        keys = shape.heads // self.grouped * self.size
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.keys = nn.Linear(shape.width, keys, bias=False)
        self.values = nn.Linear(shape.width, keys, bias=False)
        self.proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        made = (linear(x).unflatten(-1, (-1, self.size)) for linear in (self.query, self.keys, self.values))
        q, k, v = (each.transpose(1, 2) for each in made)
        q, k = (each * cos + _turned(each) * sin for each in (q, k))
        by_kernel = x.is_cuda
        if not by_kernel:
            k, v = (each.repeat_interleave(self.grouped, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=by_kernel)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return out


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class LlamaLayer(nn.Module):
    """Its attention, and an MLP of `wider` times the width behind a gate. No dropout."""

    def __init__(self, shape: Shape, wider: float) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Rotated(shape)
        between = int(wider * shape.width)
        self.gate = nn.Linear(shape.width, between, bias=False)
        self.up = nn.Linear(shape.width, between, bias=False)
        self.down = nn.Linear(between, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        y = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Decoder layers and a tied head, whose logits become float32 before the loss."""

    cos: Tensor
    sin: Tensor
    wider = 4.0

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        size = shape.width // shape.heads
        turns = torch.outer(torch.arange(shape.seq), 500_000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaLayer(shape, self.wider) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.loss(self.norm(x).flatten(0, 1), targets.flatten())

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.tokens.weight).float(), targets)


class Long(Llama):
    """For long rows: an MLP as wide as in Llama 3's 8B, and a loss in pieces, whose logits are computed again in the
    backward, so that those of `PIECE` tokens exist at once."""

    wider = 3.5

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for part, wanted in zip(x.split(PIECE), targets.split(PIECE), strict=True):
            total = total + checkpoint(self._sum, part, wanted, use_reentrant=False)
        return total / len(targets)

    def _sum(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.tokens.weight).float(), targets, reduction="sum")


def rows(batch: int, seq: int, vocabulary: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets) of random tokens, int64 [batch, seq]; targets are the inputs shifted by one."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        window = torch.randint(vocabulary, (batch, seq + 1), generator=generator)
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backend", choices=("ssd_fx", "inductor"), default="ssd_fx")
    add("--memory", default="auto", help='what the whole process may take, as 24GiB, or "auto" (default)')
    add("--dir", help="directory on the NVMe drive (default: the temporary one)")
    add("--device", default="cpu", help="default %(default)s")
    sizes = {"tokens": 8192, "layers": 4, "width": 256, "heads": 4, "vocabulary": 4096, "steps": 8, "seed": 0}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    shape = Shape(flags.layers, flags.width, flags.heads, flags.tokens, dropout=0.0)
    dtype = torch.float32 if flags.device == "cpu" else torch.bfloat16
    model = Long(shape, flags.vocabulary).to(flags.device, dtype)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compiled: Any = torch.compile(model, backend="inductor")
    if flags.backend == "ssd_fx":
        import ssd_fx

        options: dict[str, Any] = {"memory": flags.memory} | ({"dirs": [flags.dir]} if flags.dir else {})
        compiled = torch.compile(model, backend=ssd_fx.backend, options=options)
    data = rows(1, flags.tokens, flags.vocabulary, flags.seed)
    for step in range(1, flags.steps + 1):
        inputs, targets = (each.to(flags.device) for each in next(data))
        start = time.perf_counter()
        loss = compiled(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        text = f"{step}/{flags.steps} loss {loss.item():.3f}"
        print(f"{text}  {flags.tokens / (time.perf_counter() - start):.0f} tokens/s", flush=True)
    if flags.backend == "ssd_fx":
        print(ssd_fx.report())


if __name__ == "__main__":
    main()
