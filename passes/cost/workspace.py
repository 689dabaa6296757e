"""Memory that an operator takes while it runs and gives back before it returns, so that no graph shows it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ssd_fx.compat import OpOverload
from ssd_fx.passes.cost.operators import hint, operator_of
from ssd_fx.passes.partition import arguments_of, called

aten = torch.ops.aten
ROWS = 128  # to a multiple of which flash attention rounds up the rows of a sequence


def workspace_bytes(node: fx.Node) -> int:
    """Of one call, as far as it is known: what it has beside its inputs and results while it runs."""
    if not isinstance(called(node)[0], OpOverload):
        return 0
    heads_first = operator_of(node) is aten._scaled_dot_product_flash_attention_backward
    if heads_first or operator_of(node) is aten._flash_attention_backward:
        return _flash_backward(node, heads_first=heads_first)
    return 0


def _flash_backward(node: fx.Node, *, heads_first: bool) -> int:
    """Of flash attention's backward on NVIDIA's GPUs (`mha_bwd` in flash_api.cpp, PyTorch 2.11 to 2.13).

    It sums up the gradient of the queries in float32, and keeps a float32 for every row. Where heads share keys and
    values, it makes the gradients of these for every head first. It copies a gradient or a result that is not
    contiguous (`_flash_attention_backward` in attention_backward.cu). Sequences of several lengths, which lie behind
    each other there, have three dimensions, and are not looked at.
    """
    arguments = arguments_of(node)
    query, key, grad, out = (_Dense.of(arguments[name], heads_first) for name in ("query", "key", "grad_out", "out"))
    if query is None or key is None or query.device.type != "cuda" or torch.version.hip:
        return 0
    batch, rows, heads, width = query.size
    columns = _up(width, 32 if width <= 128 else 64)
    nbytes = 4 * batch * heads * _up(rows, ROWS) * (columns + 1)
    if key.size[2] != heads:
        nbytes += 2 * batch * key.size[1] * heads * width * query.itemsize
    return nbytes + sum(x.nbytes for x in (grad, out) if x is not None and not x.is_contiguous)


class _Dense(NamedTuple):
    """A tensor of batch, rows, heads, columns, its sizes as they were when the graph was traced."""

    size: list[int]
    stride: list[int]
    itemsize: int
    device: torch.device

    @staticmethod
    def of(argument: object, heads_first: bool) -> _Dense | None:
        """`heads_first`: heads come before rows."""
        tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if not isinstance(tensor, Tensor) or tensor.ndim != 4:
            return None
        order = (0, 2, 1, 3) if heads_first else range(4)
        size, stride = [[int(hint(each[d])) for d in order] for each in (tensor.shape, tensor.stride())]
        return _Dense(size, stride, tensor.itemsize, tensor.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        rows = (math.prod(self.size[d + 1 :]) for d in range(4))
        return all(step == row for step, row, n in zip(self.stride, rows, self.size, strict=True) if n != 1)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
