"""Train a narrow GPT for some steps, and write its report: the text, report.html and the trace.

    python examples/report.py --dir /mnt/nvme --out out
    python examples/report.py --dir /mnt/nvme --out out --layers 48
    python examples/report.py --dir /mnt/nvme --out out --keep-hidden   # block by block, keeping all hidden states

docs/report.md and its pictures are made of what this writes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import ssd_fx


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp_norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(mixed)
        inner: Tensor = self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))
        return x + inner


class GPT(nn.Module):
    """Returns the loss. It keeps what comes into every block in `hidden`, if that is a list."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden: list[Tensor] | None = None
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.hidden is not None:
                self.hidden.append(x)
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the drive")
    parser.add_argument("--out", required=True, type=Path, help="gets report.txt, report.html and trace.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", default="0.0")
    parser.add_argument(
        "--keep-hidden", action="store_true", help="compile block by block, in a model that keeps every hidden state"
    )
    flags = parser.parse_args()
    torch.manual_seed(0)
    vocabulary = 256
    model = GPT(flags.layers, flags.width, vocabulary)
    options = {"dirs": [flags.dir], "budget": flags.budget, "min_bytes": "256KiB", "drive_tbw": 600}
    if flags.keep_hidden:
        for block in model.blocks:
            block.compile(backend=ssd_fx.backend, options=options)
    else:
        model.compile(backend=ssd_fx.backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, vocabulary, (flags.batch, flags.sequence))
    for _ in range(flags.steps):
        model.hidden = [] if flags.keep_hidden else None
        model(tokens, tokens.roll(-1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = ssd_fx.report()
    flags.out.mkdir(parents=True, exist_ok=True)
    ssd_fx.export_trace(flags.out / "trace.json")
    (flags.out / "report.txt").write_text(f"{report}\n")
    print(report)
    report.save(flags.out / "report.html")


if __name__ == "__main__":
    main()
