"""The ways to train that are compared: how a model is compiled in each."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ssdtrain  # a neighbour of this file
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Way = Literal[
    "inductor",
    "recompute",
    "checkpoint",
    "ssd_fx",
    "layers",
    "disk_hooks",
    "ssdtrain",
    "blocks_checkpoint",
    "ssd_fx_checkpoint",
]
OURS = ("ssd_fx", "ssd_fx_checkpoint")
HOOKED = ("disk_hooks", "ssdtrain")
SMALL = 1000  # elements: what the tutorial keeps in memory

Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Hooks:
    """`around`: what stands around every forward. `written_bytes`: what its hooks have written since the last call."""

    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    written_bytes: Callable[[], int] = lambda: 0


class Checkpointed(nn.Module):
    """A block whose inner activations are computed again in the backward. `how`: a checkpoint; default PyTorch's."""

    def __init__(self, block: nn.Module, how: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.block, self.how = block, how or partial(checkpoint, use_reentrant=False)

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = self.how(self.block, *args)
        return out


def compiled(
    model: nn.Module, way: Way, budget: float, options: Mapping[str, Any], directory: str
) -> tuple[Forward, Hooks]:
    """The model, to be compiled at its first call, and the hooks around its forward.

    "inductor"; "recompute": Inductor with torch's own solver under `budget`, a share from 0 to 1; "checkpoint":
    Inductor, every layer under torch.utils.checkpoint; "ssd_fx" with `options`; "layers": Inductor, every layer a graph
    of its own, because hooks see the saved tensors of a graph only when its forward has ended; "disk_hooks",
    "ssdtrain": that with hooks that write into `directory`; "blocks_checkpoint", "ssd_fx_checkpoint": every layer a
    graph of its own, within PyTorch's checkpoint, or that of ssd_fx with `options`.
    """
    if way == "ssd_fx":
        import ssd_fx

        return torch.compile(model, backend=ssd_fx.backend, options=dict(options)), Hooks()
    if way in ("blocks_checkpoint", "ssd_fx_checkpoint"):
        for block in blocks(model):
            block.compile(backend="inductor")
        if way == "blocks_checkpoint":
            return with_layers(model, Checkpointed), Hooks()
        import ssd_fx

        ours = partial(ssd_fx.checkpoint, options=dict(options))
        return with_layers(model, lambda block: Checkpointed(block, ours)), Hooks()
    if way in ("layers", *HOOKED):
        for block in blocks(model):
            block.compile(backend="inductor")
        if way == "layers":
            return model, Hooks()
        where = tempfile.mkdtemp(dir=directory or None)
        if way == "disk_hooks":
            return model, disk_hooks(where)
        cache = ssdtrain.Cache(model, blocks(model), where)
        return model, Hooks(cache.hooks, cache.written_bytes)
    if way == "recompute":
        torch._functorch.config.activation_memory_budget = budget
    if way == "checkpoint":
        model = with_layers(model, Checkpointed)
    return torch.compile(model, backend="inductor"), Hooks()


def with_layers(model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Another model of the same weights. Its layers, the elements of each ModuleList, are those that `change` makes."""
    other = copy.copy(model)
    other._modules = dict(model._modules)
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            other._modules[name] = nn.ModuleList(change(block) for block in child)
    return other


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers, in the order in which they run."""
    return [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]


class _TemporaryFile:
    def __init__(self, directory: str) -> None:
        self.name = os.path.join(directory, str(uuid.uuid4()))

    def __del__(self) -> None:
        os.remove(self.name)


def disk_hooks(directory: str) -> Hooks:
    """Hooks as PyTorch's tutorial "Hooks for autograd saved tensors" has them: one file for every saved tensor."""
    written = [0]

    def pack(x: Tensor) -> Tensor | _TemporaryFile:
        if x.numel() < SMALL:
            return x
        file = _TemporaryFile(directory)
        torch.save(x, file.name)
        written[0] += os.path.getsize(file.name)
        return file

    def unpack(packed: Tensor | _TemporaryFile) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        x: Tensor = torch.load(packed.name)
        return x

    def written_bytes() -> int:
        since, written[0] = written[0], 0
        return since

    return Hooks(lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack), written_bytes)
