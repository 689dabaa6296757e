"""torchao: linear layers that compute in 8 bits, and quantization-aware training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.bitwise import Compile
from tests.loops.loops import assert_no_bit_changes, seen_in_steps
from tests.ways.ways import installed

pytestmark = pytest.mark.slow
installed("torchao")

WIDTH = 64


def net() -> nn.Module:
    inner = [[nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()] for _ in range(3)]
    return nn.Sequential(*(module for block in inner for module in block))


def float8(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))


def int8_weights(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())


def int8_products(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    quantize_(model, int8_mixed_precision_training())


def aware(model: nn.Module) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(model, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))


CONVERSIONS = {
    "float8, emulated": float8,
    "int8 weights": int8_weights,
    "int8 products": int8_products,
    "quantization-aware": aware,
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_training(tmp_path: Path, inner: str, convert: Callable[[nn.Module], None]) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        torch.manual_seed(0)
        model = net()
        convert(model)
        compiled = compile(model)
        seen = seen_in_steps(model, lambda _: compiled(torch.randn(128, WIDTH)).square().mean())
        assert len(seen) > 2
        return seen

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner, share=0.5)
