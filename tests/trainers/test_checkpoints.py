"""`ssd_fx.checkpoint` in the place of Hugging Face's gradient checkpointing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ssd_fx
from tests.bitwise import prove_bitwise

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=128, attention_dropout=0.1)
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128, resid_pdrop=0.1)
    ),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, intermediate_size=128, head_dim=16)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_decoder_with_gradient_checkpointing(name: str, tmp_path: Path) -> None:
    def train(how: Any) -> list[Tensor]:
        model = MODELS[name]().train()
        model._set_gradient_checkpointing(gradient_checkpointing_func=how)
        tokens, seen = torch.arange(2 * 32).view(2, 32) % 128, list[Tensor]()
        for step in range(3):
            torch.manual_seed(step)
            model.zero_grad()
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return seen

    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "allow_tmpfs": True, "budget": 0}
    prove_bitwise(train, [partial(checkpoint, use_reentrant=False), partial(ssd_fx.checkpoint, options=options)])
    stats = ssd_fx.stats()
    assert stats.loads == stats.stores == 9
