"""What code is generated for: each case is a model and its inputs, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from examples.train_gpt import GPT, Shape

Case = tuple[nn.Module, tuple[Tensor, ...]]


def mlp() -> Case:
    layers = [nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512), nn.GELU(), nn.Linear(512, 512)]
    return nn.Sequential(*layers), (torch.randn(1024, 512),)


class Gated(nn.Module):
    """No row is a multiple of 16 bytes, and the second of two views of one product begins at no such multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(33, 2 * 131), nn.Linear(131, 33)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.wide(x).chunk(2, 1)
        out: Tensor = self.narrow(F.silu(gate) * value)
        return out


def gpt(layers: int, *, flash: bool = False) -> Case:
    """With `flash` in bfloat16, its attention the kernel that a GPU has for it."""
    shape = Shape(layers=layers, width=256, heads=4, seq=128, dropout=0.1)
    model = GPT(shape)
    if flash:
        model.to(torch.bfloat16)
        for block in model.blocks:
            block.attention = Flash(block.attention)
    return model, (torch.randint(0, 256, (8, 128)), torch.randint(0, 256, (8, 128)))


class Flash(nn.Module):
    """The attention of GPT. `scaled_dot_product_attention` cannot choose this kernel where there is none."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = attention.heads, attention.qkv, attention.proj
        self.dropout = attention.dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
        out: Tensor = self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return out


def conv_net() -> Case:
    def stage(of: int, to: int) -> list[nn.Module]:
        return [nn.Conv2d(of, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)]
    return nn.Sequential(*stage(3, 32), *stage(32, 64), *stage(64, 64), *head), (torch.randn(16, 3, 64, 64),)


class Flex(nn.Module):
    """Two products around attention whose scores fall with the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        def nearer(score: Tensor, _batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score - 0.1 * (row - column).abs()

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y: Any = flex_attention(q, k, v, score_mod=nearer)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class LSTM(nn.Module):
    """Unrolled over the steps of its input; the gates are views of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_hidden, self.head = nn.Linear(64, 4 * 128), nn.Linear(128, 4 * 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[1], 128)
        for step in x:
            i, f, g, o = (self.of_input(step) + self.of_hidden(hidden)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        out: Tensor = self.head(hidden)
        return out


class Mamba(nn.Module):
    """Of transformers, two layers; its scan is unrolled over the tokens."""

    def __init__(self) -> None:
        from transformers import MambaConfig, MambaForCausalLM

        super().__init__()
        config: Any = MambaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False)
        self.model = MambaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


class InPieces(nn.Module):
    """A loss over so many pieces of its rows, each of which computes its logits again in the backward.

    Its head is the table of the words, so what adds up to the gradient is read by a loop.
    """

    PIECES, ROWS, WIDTH, WORDS = 12, 64, 256, 4096

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(self.WORDS, self.WIDTH, dtype=torch.bfloat16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros((), device=ids.device)
        for rows, wanted in zip(self.words(ids).split(self.ROWS), targets.split(self.ROWS), strict=True):
            total = total + checkpoint(self._loss, rows, wanted, use_reentrant=False)
        return total

    def _loss(self, rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, self.words.weight).float(), wanted, reduction="sum")


def in_pieces() -> Case:
    rows = InPieces.PIECES * InPieces.ROWS
    return InPieces(), (torch.randint(0, InPieces.WORDS, (rows,)), torch.randint(0, InPieces.WORDS, (rows,)))


PIECES = "loss in pieces"
CASES: dict[str, Callable[[], Case]] = {
    "MLP": mlp,
    "MLP of odd sizes": lambda: (Gated(), (torch.randn(77, 33),)),
    "GPT, 1 layer": partial(gpt, 1),
    "GPT, 2 layers": partial(gpt, 2),
    "GPT, 3 layers": partial(gpt, 3),
    "GPT, 2 layers, flash attention": partial(gpt, 2, flash=True),
    "GPT, 1 layer, sizes in symbols": partial(gpt, 1),
    "conv net": conv_net,
    PIECES: in_pieces,
    "LSTM": lambda: (LSTM(), (torch.randn(4, 32, 64),)),
    "flex_attention": lambda: (Flex(), (torch.randn(2, 128, 64),)),
    "Mamba": lambda: (Mamba(), (torch.randint(0, 256, (4, 4)),)),
}
DYNAMIC = ("GPT, 1 layer, sizes in symbols",)
