"""The networks of diffusers: a UNet, a DiT and a Flux."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bitwise import Compile
from tests.loops.loops import assert_no_bit_changes, seen_in_steps
from tests.ways.ways import installed

pytestmark = pytest.mark.slow
diffusers = installed("diffusers")

Made = tuple[Any, dict[str, Any]]  # the network, and the arguments of its call


def unet() -> Made:
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    network = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), **kinds
    )
    return network, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([10, 500])}


def dit() -> Made:
    network = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    how = {"timestep": torch.tensor([1, 2]), "class_labels": torch.tensor([3, 4])}
    return network, {"hidden_states": torch.randn(2, 4, 16, 16), **how}


def flux() -> Made:
    network = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    text = {"encoder_hidden_states": torch.randn(2, 8, 32), "pooled_projections": torch.randn(2, 32)}
    places = {"img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(8, 3), "timestep": torch.tensor([0.1, 0.5])}
    return network, {"hidden_states": torch.randn(2, 64, 16), **text, **places}


@pytest.mark.parametrize("make", [unet, dit, flux])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_network(tmp_path: Path, inner: str, make: Callable[[], Made]) -> None:
    def loop(compile: Compile) -> list[Tensor]:
        torch.manual_seed(0)
        network, call = make()
        compiled = compile(network.train())
        return seen_in_steps(network, lambda _: compiled(**call, return_dict=False)[0].square().mean())

    # Inductor chooses other kernels of convolutions: gradients of the first layers are apart.
    how: dict[str, Any] = {"section": "ways of working", "plain": inner, "apart": 5e-3, "parts": make is flux}
    assert_no_bit_changes(loop, tmp_path, inner, **how)
