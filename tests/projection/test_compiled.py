"""The formulas against plans of models that are really compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from projection.formulas import layer_bytes, outside_bytes
from projection.scenario import Model, Parallelism
from torch import Tensor, nn
from torch.nn import functional as F

import ssd_fx
from examples.train_gpt import GPT, VOCABULARY, Shape

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS = 4, 64, 128, 2, 3
STATISTICS = 4 * BATCH * SEQUENCE * HEADS  # bytes of logsumexp; the formulas leave it and those of norms out


def offloaded(model: Any, *inputs: Tensor) -> dict[str, Any]:
    options = {"inner": "aot_eager", "engine": "memory", "machine": "default", "budget": 0, "min_bytes": STATISTICS + 1}
    (graph,) = ssd_fx.explain(model, options=options)(*inputs).dumps
    return dict(graph.plan)


@pytest.mark.parametrize(("dtype", "each"), [("fp32", 66), ("bf16", 34)])
def test_a_compiled_gpt_saves_what_the_formulas_say(dtype: str, each: int) -> None:
    """To the byte: three layers, the mask behind the embedding, the last norm, the head, and the logits."""
    torch.manual_seed(0)
    model = GPT(Shape(layers=LAYERS, width=WIDTH, heads=HEADS, seq=SEQUENCE, dropout=0.1))
    words = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    plan = offloaded(model.bfloat16() if dtype == "bf16" else model, words, words)
    shape = Model(layers=LAYERS, width=WIDTH, heads=HEADS, sequence=SEQUENCE, vocabulary=VOCABULARY, dtype=dtype)
    layer = layer_bytes(shape, Parallelism(), BATCH)
    assert layer == each * BATCH * SEQUENCE * WIDTH
    assert plan["offloaded_bytes"] == LAYERS * layer + outside_bytes(shape, Parallelism(), BATCH)


class Gated(nn.Module):
    """A layer as of Llama: fewer heads of keys and values, a gated MLP, no dropout."""

    def __init__(self, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * WIDTH // HEADS)
        self.gate, self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q = self.q(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("kv_heads", [HEADS, 1])
def test_a_compiled_gated_layer_saves_what_the_formulas_say(kv_heads: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(BATCH, SEQUENCE, WIDTH, requires_grad=True)
    plan = offloaded(Gated(kv_heads, 320), x)
    mlp: dict[str, Any] = {"ffn": 320, "gated": True}
    heads = {"heads": HEADS, "kv_heads": kv_heads}
    shape = Model(layers=1, width=WIDTH, **heads, **mlp, dropout=False, sequence=SEQUENCE, dtype="fp32")
    assert plan["offloaded_bytes"] == layer_bytes(shape, Parallelism(), BATCH)
