"""What ssd_fx is compared with in pareto.py: models without data, and the ways to need less memory without a drive.

A rival is the model as PyTorch would train it: with checkpoints around its layers, or cut by PyTorch under an
`activation_memory_budget`. Everything that its own forward saves then stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import families  # neighbours of this file
import images
import torch
from families import train_gpt
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


class Checkpointed(nn.Module):
    """Layers in a row that are computed again together, but for what `context` saves."""

    def __init__(self, layers: Sequence[nn.Module], context: Callable[[], Any] | None) -> None:
        super().__init__()
        self.layers, self.context = nn.ModuleList(layers), context

    def forward(self, *args: Tensor) -> Tensor:
        more: dict[str, Any] = {"context_fn": self.context} if self.context else {}
        out: Tensor = checkpoint(self._run, *args, use_reentrant=False, **more)
        return out

    def _run(self, x: Tensor, *rest: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *rest)
        return x


def checkpointed(model: nn.Module, count: int, context: Callable[[], Any] | None = None) -> nn.Module:
    """`model`, which changes: a checkpoint is around every `count` layers, which are the elements of a ModuleList."""
    for layers in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        groups = [Checkpointed(list(layers[i : i + count]), context) for i in range(0, len(layers), count)]
        del layers[:]
        layers.extend(groups)
    return model


@contextmanager
def pytorch_budget(share: float) -> Iterator[None]:
    with functorch_config.patch(activation_memory_budget=share):
        yield


@dataclass(frozen=True)
class Rival:
    """`change`: of the model. `around`: a context to compile it in."""

    name: str
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    around: Callable[[], AbstractContextManager[None]] = nullcontext


KEEP, CHECKPOINT = "keep all", "checkpoint per layer"
SHARES = tuple(i / 10 for i in range(11))
BUDGETED = "PyTorch's budget"


def rivals(shares: Sequence[float] = SHARES) -> list[Rival]:
    """All but those that need a drive."""
    selective = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return [
        Rival(KEEP),
        Rival(CHECKPOINT, partial(checkpointed, count=1)),
        Rival("checkpoint per two layers", partial(checkpointed, count=2)),
        Rival("selective checkpoint", partial(checkpointed, count=1, context=selective)),
        *(Rival(f"{BUDGETED} {share:g}", around=partial(pytorch_budget, share)) for share in shares),
    ]
