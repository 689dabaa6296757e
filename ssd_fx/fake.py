"""Tensors without memory, so that a model larger than the machine can be looked at.

PyTorch's FakeTensors have shape, dtype and device, and no data. That is enough to say how large the tensors are that a
step saves, and how long its operators take.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from ssd_fx.compat import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    _disable_current_modes,
    detect_fake_mode,
    tree_leaves,
    tree_map_only,
)

PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
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


def first_state(optimizer: torch.optim.Optimizer, new: Collection[torch.Tensor]) -> dict[int, int]:
    """Bytes of the state that the next step makes for parameters that have none yet, by their ids.

    A copy of the optimizer takes that step, on tensors without memory: one for all parameters that are alike. Hooks of
    a step are not called.

    Raises: anything, as the code of the optimizer's step runs on tensors without data.
    """
    asked, mode = set(map(id, new)), FakeLarge()
    mode.fake = next((p.fake_mode for p in new if isinstance(p, FakeTensor)), mode.fake)
    first = dict[Any, torch.Tensor]()  # of parameters that are alike
    made, groups, kinds = copy.copy(optimizer), [], dict[int, Any]()
    with _disable_current_modes(), torch.no_grad():
        with FakeCopyMode(mode.fake):
            for i, group in enumerate(optimizer.param_groups):
                known = len(first)
                for p in group["params"]:
                    if id(p) in asked:
                        kinds[id(p)] = kind = (i, p.shape, p.stride(), p.dtype, p.device)
                        first[kind] = first[kind] if kind in first else copy.deepcopy(p)
                own = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                groups.append(own | {"params": list(first.values())[known:]})
        made.param_groups, made.state = groups, defaultdict(dict)
        with mode:
            for parameter in first.values():
                parameter.grad = torch.zeros_like(parameter)
            inspect.unwrap(type(made).step)(made)
    return {at: nbytes_of(made.state.get(first[kind])) for at, kind in kinds.items()}


def nbytes_of(tree: Any) -> int:
    """The bytes of all tensors in a tree; of sharded ones the part of this rank."""
    return sum(int(getattr(x, "_local_tensor", x).nbytes) for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
