"""Tensors without memory, so that a model larger than the machine can be looked at.

PyTorch's FakeTensors have shape, dtype and device, and no data. That is enough to say how large the tensors are that a
step saves, and how long its operators take.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ssd_fx.compat import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    detect_fake_mode,
    tree_leaves,
    tree_map_only,
)

LARGE_BYTES = 1 << 20  # a program may compute with the values of what is smaller: indices, schedules, a batch of text


class FakeLarge(TorchDispatchMode):
    """Tensors that are made while it is on are fake from `LARGE_BYTES` on, and so is what is computed of them.

    Smaller ones have data. So has what is computed of tensors with data alone, such as a data set that was read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        read = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
        if read and not any(isinstance(x, FakeTensor) for x in read):
            return func(*args, **given)
        with self.fake:
            made = func(*args, **given)
        # PyTorch's weak references to what it made keep `model.bfloat16()` from converting fake parameters.
        self.fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        if read or sum(x.nbytes for x in tree_leaves(made) if isinstance(x, torch.Tensor)) >= LARGE_BYTES:
            return made
        return func(*args, **given)


def off_meta(model: Callable[..., Any], call: tuple[Any, Any]) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """`model` and the arguments of a `call`, with FakeTensors in place of what is on the device "meta".

    They are on the device of the other tensors, else on the CPU. Neither is changed: such a model is copied, and the
    copy shares all other tensors.
    """
    own = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    tensors = [x for x in (*own, *tree_leaves(call)) if isinstance(x, torch.Tensor)]
    if not any(x.is_meta for x in tensors):
        return model, call
    device = next((x.device for x in tensors if not x.is_meta), torch.device("cpu"))
    fake = detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)

    def placed(x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            return x
        with fake:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    memo: dict[int, Any] = {id(x): placed(x) for x in own}
    return copy.deepcopy(model, memo), tree_map_only(torch.Tensor, placed, call)


def with_batch(call: tuple[Any, Any], batch: int) -> tuple[Any, Any]:
    """The arguments of a `call` with another batch size, which is the first size of the first tensor.

    Every tensor with that first size gets the new one, and is fake.

    Raises:
        ValueError: no argument is a tensor with sizes.
    """
    tensors = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]
    before = batch_of(call)
    if before is None:
        raise ValueError(f"batch={batch}: the model gets no tensor with a batch; right would be no batch")
    fake = detect_fake_mode(tensors) or FakeTensorMode(allow_non_fake_inputs=True)

    def sized(x: torch.Tensor) -> torch.Tensor:
        if not x.dim() or x.shape[0] != before:
            return x
        with fake:
            made = torch.empty((batch, *x.shape[1:]), dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)

    found: tuple[Any, Any] = tree_map_only(torch.Tensor, sized, call)
    return found


def batch_of(call: tuple[Any, Any]) -> int | None:
    """The first size of the first tensor among the arguments of a `call`; None if there is none."""
    sizes = (x.shape[0] for x in tree_leaves(call) if isinstance(x, torch.Tensor) and x.dim())
    return next(sizes, None)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state; of one that has none yet, those after a first step of a copy without memory."""
    if not optimizer.state:
        optimizer = _stepped(optimizer)
    leaves = tree_leaves([dict(state) for state in optimizer.state.values()])
    return sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))


def _stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    mode = FakeLarge()
    mode.fake = detect_fake_mode(parameters) or mode.fake
    with FakeCopyMode(mode.fake):
        made = copy.deepcopy(optimizer)
    with mode, torch.no_grad():
        for parameter in (p for group in made.param_groups for p in group["params"]):
            parameter.grad = torch.zeros_like(parameter)
        made.step()
    return made
