"""torchtune compiles block by block under the backend that the environment names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bitwise import Compile, by_name
from tests.loops.loops import assert_no_bit_changes, seen_in_steps

pytestmark = pytest.mark.slow
pytest.importorskip("torchtune", reason="torchtune 0.6.1 needs torchao 0.10: make ways puts that ahead of the path")

SIZES = {"vocab_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64, "max_seq_len": 64}
SIZES |= {"intermediate_dim": 128}


def full() -> Any:
    from torchtune.models.llama3 import llama3

    return llama3(**SIZES)


def lora() -> Any:
    from torchtune.models.llama3 import lora_llama3
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    model = lora_llama3(["q_proj", "v_proj"], **SIZES, lora_rank=4, lora_alpha=8)
    set_trainable_params(model, get_adapter_params(model))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b.weight"):
            torch.nn.init.normal_(parameter, std=0.1)  # it is zero at first, and so are gradients of the other matrix
    return model


def loss(model: Any, step: int) -> Tensor:
    tokens = torch.randint(128, (2, 64), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("make", [full, lora])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_compile_model(tmp_path: Path, inner: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtune.training import compile_model

    def loop(compile: Compile) -> list[Tensor]:
        torch.manual_seed(0)
        model = make()
        with by_name(compile) as backend:
            monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)
            compile_model(model, verbose=False)
            return seen_in_steps(model, lambda step: loss(model, step))

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner)
