"""The models of the benchmarks: the GPT, the Llama and the one for long rows of the examples, a BERT encoder with
masked-LM loss, and a T5 encoder-decoder.

All are transformers of equal layers, with the norm first, on bytes of a text, and return their loss: one graph is one
step. They are written for what they cost, so sizes are those of the originals, and what only changes results is left
out (T5's relative positions, its norm without a mean).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # GPT, Llama and data are those of the examples

import torch  # noqa: E402 - with the lines around it
import torch.nn.functional as F  # noqa: E402
import train_gpt as train_gpt  # noqa: E402 - found through the path above; the benchmarks take it from here
from torch import Tensor, nn  # noqa: E402
from train_long import Llama as Llama  # noqa: E402
from train_long import Long, rows  # noqa: E402

Family = Literal["gpt", "bert", "t5", "llama", "long"]
FAMILIES: tuple[Family, ...] = ("gpt", "bert", "t5", "llama", "long")
MASKED = 0.15  # of BERT's tokens (Devlin et al. 2018)
IGNORED = -100  # of cross_entropy: a target that does not count
WORDS = 128_256  # of Llama 3


class Attention(nn.Module):
    """Of `x` to itself, or to a `context`. Dropout as in the example: on the projection only."""

    def __init__(self, shape: train_gpt.Shape, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.query = nn.Linear(shape.width, shape.width)
        self.keys = nn.Linear(shape.width, 2 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.keys(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.dropout(self.proj(y.transpose(1, 2).flatten(2)))
        return out


class Layer(nn.Module):
    """Self-attention, attention to a context if there is `cross`, and the MLP."""

    def __init__(self, shape: train_gpt.Shape, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, causal)
        self.cross_norm = nn.LayerNorm(shape.width) if cross else None
        self.cross = Attention(shape) if cross else None
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y)
        if self.cross is not None and self.cross_norm is not None and context is not None:
            x = x + self.cross(self.cross_norm(x), context)
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return out


class Bert(nn.Module):
    """Encoder layers and a tied masked-LM head. Targets that are `IGNORED` do not count."""

    def __init__(self, shape: train_gpt.Shape, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class T5(nn.Module):
    """Half of the layers, rounded down, are the decoder's, as in the paper; both sides read the inputs."""

    def __init__(self, shape: train_gpt.Shape, vocabulary: int) -> None:
        super().__init__()
        decoder = shape.layers // 2
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.seq, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers - decoder))
        self.decoder = nn.ModuleList(Layer(shape, causal=True, cross=True) for _ in range(decoder))
        self.encoder_norm, self.norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        embedded = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        x, y = self.dropout(embedded), self.dropout(embedded)
        for block in self.blocks:
            x = block(x)
        context = self.encoder_norm(x)
        for block in self.decoder:
            y = block(y, context)
        logits = F.linear(self.norm(y), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS = {"bert": Bert, "t5": T5, "llama": Llama, "long": Long}


def make(family: Family, shape: train_gpt.Shape, vocabulary: int) -> nn.Module:
    """The model, with random weights of the present seed."""
    if family == "gpt":
        gpt = train_gpt.GPT(shape)
        if vocabulary != train_gpt.VOCABULARY:
            gpt.tokens = nn.Embedding(vocabulary, shape.width)
            nn.init.normal_(gpt.tokens.weight, std=0.02)
        return gpt
    model: nn.Module = MODELS[family](shape, vocabulary)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def batches(family: Family, batch: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), int64 [batch, seq]: the example's. Of BERT some inputs are masked, and they count.

    Rows longer than the example's text are random bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    long = seq >= sum(path.stat().st_size for path in train_gpt.DATA.glob("*.txt"))
    found = rows(batch, seq, train_gpt.VOCABULARY, seed) if long else train_gpt.batches(batch, seq, seed)
    for inputs, targets in found:
        if family == "bert":
            masked = torch.rand(inputs.shape, generator=generator) < MASKED
            yield inputs.masked_fill(masked, 0), inputs.masked_fill(~masked, IGNORED)
        else:
            yield inputs, targets
