"""What ssd_fx is compared with in pareto.py: models without data, and the ways to need less memory without a drive.

A rival is the model as PyTorch would train it: with checkpoints around its layers, or cut by PyTorch under an
`activation_memory_budget`. Everything that its own forward saves then stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import families  # neighbours of this file
import images
import torch
from families import train_gpt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Plan
from ssd_fx.rivals import CHECKPOINT, budgeted, checkpointed, kept, kept_under, layers_of

aten = torch.ops.aten
PRODUCTS = [  # and attention, and convolutions: what the selective policy saves
    *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default),
    *(aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default),
    aten._scaled_dot_product_efficient_attention.default,
]
Call = tuple[nn.Module, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Of a model. `batch` x `seq` tokens, or patches, or `batch` images of `seq` x `seq`; `vocabulary`: of a text."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    vocabulary: int = 0

    def __str__(self) -> str:
        words = f", {self.vocabulary:,} words" if self.vocabulary else ""
        return f"{self.name}, {self.layers} layers, width {self.width}, {self.batch} x {self.seq}{words}"


SIZES = {
    "gpt": Sizes("gpt", 8, 2048, 16, 1, 4096, 32_000),
    "llama": Sizes("llama", 8, 2048, 32, 1, 4096, 32_000),
    "bert": Sizes("bert", 8, 1024, 16, 16, 512, 30_522),
    "t5": Sizes("t5", 8, 1024, 16, 16, 512, 32_128),
    "vit": Sizes("vit", 8, 1024, 16, 32, 256),
    "unet": Sizes("unet", 2, 256, 0, 8, 64),
}


def made(sizes: Sizes) -> Call:
    """The model in bfloat16 and its inputs, without data, on the device "meta"."""
    with torch.device("meta"):
        shape = train_gpt.Shape(sizes.layers, sizes.width, sizes.heads, sizes.seq, 0.0)
        if sizes.name == "unet":
            noise = torch.empty(sizes.batch, images.NOISE, sizes.seq, sizes.seq, dtype=torch.bfloat16)
            return images.UNet(sizes.width, sizes.layers).bfloat16(), (noise, noise)
        if sizes.name == "vit":
            side = images.PATCH * round(sizes.seq**0.5)
            pixels = torch.empty(sizes.batch, images.CHANNELS, side, side, dtype=torch.bfloat16)
            return images.ViT(shape).bfloat16(), (pixels, torch.empty(sizes.batch, dtype=torch.int64))
        text = torch.empty(sizes.batch, sizes.seq, dtype=torch.int64)
        (family,) = (each for each in families.FAMILIES if each == sizes.name)
        return families.make(family, shape, sizes.vocabulary).bfloat16(), (text, text)


class Together(nn.Module):
    """Layers in a row that are computed again together."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, *args, use_reentrant=False)
        return out

    def _run(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def in_pairs(model: nn.Module) -> AbstractContextManager[None]:
    """`model` changes for good: a checkpoint is around every two layers, which are the elements of a ModuleList."""
    for layers in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        groups = [Together(list(layers[i : i + 2])) for i in range(0, len(layers), 2)]
        del layers[:]
        layers.extend(groups)
    return nullcontext()


def per_layer(model: nn.Module, context: Callable[[], Any] | None = None) -> AbstractContextManager[None]:
    """Within, a checkpoint is around each layer, which saves what the policy of `context` says."""
    return checkpointed(layers_of(model), context)


@dataclass(frozen=True)
class Rival:
    """`around`: the context to compile a model in. `look`: the plan of its joint graph, with everything kept."""

    name: str
    around: Callable[[nn.Module], AbstractContextManager[None]] = lambda model: nullcontext()
    look: Callable[[Joint, PlanOptions], Plan] = kept


KEEP = "keep all"
SHARES = tuple(i / 10 for i in range(11))


def rivals(shares: Sequence[float] = SHARES) -> list[Rival]:
    """All but those that need a drive."""
    selective = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return [
        Rival(KEEP),
        Rival(CHECKPOINT, per_layer),
        Rival("checkpoint per two layers", in_pairs),
        Rival("selective checkpoint", partial(per_layer, context=selective)),
        *(Rival(budgeted(share), look=partial(kept_under, share)) for share in shares),
    ]
