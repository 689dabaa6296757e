"""Adapters of PEFT: beside a frozen model, and beside one in 4 bits of bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bitwise import Compile
from tests.loops.loops import assert_no_bit_changes, seen_in_steps
from tests.ways.test_transformers import SIZES, llama, texts, transformers
from tests.ways.ways import installed

pytestmark = pytest.mark.slow
peft = installed("peft")


def adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.1))


def quantized(directory: Path) -> Any:
    installed("bitsandbytes")
    config = transformers.LlamaConfig(**(SIZES | {"hidden_size": 64, "intermediate_size": 128}))
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.LlamaForCausalLM.from_pretrained(directory, quantization_config=how, device_map={"": "cpu"})
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("base", ["float32", "nf4"])
@pytest.mark.parametrize("compiled", ["whole", "blocks"])
def test_lora(tmp_path: Path, base: str, compiled: str, inner: str) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        model = adapted(llama() if base == "float32" else quantized(tmp_path / "model")).train()
        parts = [model] if compiled == "whole" else list(model.base_model.model.model.layers)
        for part in parts:
            part.compile(**compile.keywords)  # type: ignore[attr-defined]
        seen = seen_in_steps(model, lambda _: model(input_ids=texts(), labels=texts()).loss)
        assert len(seen) == 2 * (1 + 2 * 2 * 2)  # two layers, two products, two matrices
        return seen

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner)
