"""Train a small GPT on the bytes of a text, with plain Inductor or with saved activations on NVMe.

python examples/train_gpt.py                                  # ssd_fx
python examples/train_gpt.py --budget 256MiB --dir /mnt/nvme  # at most that much stays in memory
python examples/train_gpt.py --backend inductor               # the same training without it
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DATA = Path(__file__).parent / "data"
VOCABULARY = 256  # bytes
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    seq: int
    dropout: float


class Attention(nn.Module):
    """Causal self-attention.

    Dropout is on the projection only: on CPU the fused attention kernel has no dropout of the attention weights, and
    asking for it would bring back the seq x seq matrix that the kernel avoids.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Pre-LayerNorm GPT with tied embedding and head. It returns the loss, so that one graph holds all of a step."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # as in GPT-2: what is added to the residual stream starts smaller
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if residual else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(batch: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random (inputs, targets), int64 [batch, seq]; targets are the inputs shifted by one byte."""
    text = b"".join(path.read_bytes() for path in sorted(DATA.glob("*.txt")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - seq, (batch, 1), generator=generator)
        window = data[starts + torch.arange(seq + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def compile_model(model: nn.Module, backend: str, budget: str | None = None, directory: str | None = None) -> Any:
    """The one line that changes is the one with `ssd_fx.backend`; options that are left out have defaults."""
    if backend == "eager":
        return model
    if backend == "inductor":
        return torch.compile(model, backend="inductor")
    import ssd_fx

    flags = {"budget": budget, "dirs": directory and [directory]}
    options: dict[str, Any] = {name: value for name, value in flags.items() if value}
    return torch.compile(model, backend=ssd_fx.backend, options=options)


def stats() -> dict[str, Any]:
    """What ssd_fx did so far (bytes stored, written, read, seconds waited, ...), or {} when it is not in use."""
    ssd_fx = sys.modules.get("ssd_fx")
    return asdict(ssd_fx.stats()) if ssd_fx else {}


def resident_bytes(field: str = "VmRSS") -> int:
    """Memory of this process as `top` shows it; "VmHWM" is the highest so far, compilation included."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


class Progress:
    """A bar that redraws itself on a terminal, and a line every `every` steps elsewhere."""

    def __init__(self, steps: int, every: int = 10) -> None:
        self.steps, self.every, self.tty = steps, every, sys.stdout.isatty()

    def show(self, step: int, text: str) -> None:
        last = step == self.steps
        if self.tty:
            bar = ("#" * (20 * step // self.steps)).ljust(20, ".")
            print(f"\r[{bar}] {step}/{self.steps} {text}\x1b[K", end="\n" if last else "", flush=True)
        elif last or step == 1 or step % self.every == 0:
            print(f"{step}/{self.steps} {text}", flush=True)


def add_budget_flag(parser: argparse.ArgumentParser) -> None:
    text = "saved bytes that may stay in memory: 256MiB, or a share of them such as 0.25 (default: auto)"
    parser.add_argument("--budget", help=text)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dir", help="directory on the NVMe drive (default: the temporary one)")
    for name, default in {"layers": 6, "width": 384, "heads": 6, "batch": 8, "seq": 256, "seed": 0}.items():
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    for name, rate in {"dropout": 0.1, "lr": 1e-3}.items():
        add(f"--{name}", type=float, default=rate, help="default %(default)s")
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--json", metavar="OUT", help="write times, losses, peaks and stats to this file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("ssd_fx", "inductor", "eager"), default="ssd_fx")
    parser.add_argument("--steps", type=int, default=200, help="default %(default)s")
    add_budget_flag(parser)
    add_model_flags(parser)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    model = GPT(Shape(flags.layers, flags.width, flags.heads, flags.seq, flags.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    compiled = compile_model(model, flags.backend, flags.budget, flags.dir)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters; the first step compiles", flush=True)

    data = batches(flags.batch, flags.seq, flags.seed)
    progress = Progress(flags.steps)
    times: list[float] = []
    losses: list[float] = []
    for step in range(1, flags.steps + 1):
        inputs, targets = next(data)
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=flags.amp):
            loss = compiled(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
        memory = f"resident {resident_bytes() / MIB:.0f} MiB  disk {stats().get('disk_bytes', 0) / MIB:.0f} MiB"
        rate = flags.batch * flags.seq / times[-1]
        progress.show(step, f"loss {losses[-1]:.3f}  {rate:.0f} tokens/s  {memory}")

    if flags.json:
        result: dict[str, Any] = {"flags": vars(flags), "step_s": times, "loss": losses, "stats": stats()}
        result["peak_resident_bytes"] = resident_bytes("VmHWM")
        Path(flags.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
