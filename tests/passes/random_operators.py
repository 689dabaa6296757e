"""Lines of a random program that compute: one function per family, each of which draws its operands and adds a line."""

from __future__ import annotations

import re

import torch

from tests.passes.random_graphs import Draft, broadcasts, is_float, is_integer, is_single
from tests.passes.random_views import CHANGES, VIEWS


def pointwise(d: Draft) -> None:
    x = d.pick(is_float)
    name = d.one("relu", "sigmoid", "tanh", "sin", "square", "abs", "neg")
    d.define(f"{x}.{name}()")


def activation(d: Draft) -> None:
    x = d.pick(is_float)
    d.define(f"F.{d.one('gelu', 'silu', 'softplus', 'elu', 'dropout', 'leaky_relu')}({x})")


def binary(d: Draft) -> None:
    x = d.pick(is_float)
    shape = d.values[x].shape
    y = d.pick(lambda t: is_float(t) and broadcasts(t.shape, shape))
    d.define(d.one(f"{x} * {y}", f"{x} + {y}", f"{x} - {y}", f"torch.maximum({x}, {y})", f"torch.atan2({x}, {y})"))


def spread(d: Draft) -> None:
    """A small tensor over a large one: what is saved has strides of zero."""
    x = d.pick(is_float)
    y = d.pick(lambda t: is_float(t) and t.shape != d.values[x].shape and broadcasts(d.values[x].shape, t.shape))
    d.define(f"{x}.sin().expand_as({y}) * {y}")


def constant(d: Draft) -> None:
    x = d.pick(is_float)
    d.define(d.one(f"{x} * 0.5", f"{x} + 1", f"1 - {x}", f"{x}.clamp(-1, 1)", f"{x}.clone()", f"{x}.detach()"))


def matmul(d: Draft) -> None:
    x = d.pick(lambda t: is_float(t) and t.dim() >= 2)
    columns = d.values[x].shape[-1]
    cast = ".bfloat16()" if d.values[x].dtype == torch.bfloat16 else ""
    d.define(f"{x} @ {d.weight(columns, d.number(1, 8))}{cast}")


def self_matmul(d: Draft) -> None:
    """x @ x.T saves the same storage twice; attention weights are of this kind."""
    x = d.pick(lambda t: is_float(t) and t.dim() >= 2)
    y = d.pick(lambda t: t.dtype == d.values[x].dtype and t.shape == d.values[x].shape)
    d.define(f"{x} @ {y}.transpose(-1, -2)")


def linear(d: Draft) -> None:
    x = d.pick(lambda t: is_single(t) and t.dim() >= 1)
    columns, out = d.values[x].shape[-1], d.number(1, 8)
    d.define(f"F.linear({x}, {d.weight(out, columns)}, {d.weight(out)})")


def reduction(d: Draft) -> None:
    x = d.pick(is_float)
    name = d.one("sum", "mean", "amax", "logsumexp", "var", "prod")
    d.define(f"{x}.{name}(dim={d.dim(x)}, keepdim={bool(d.number(0, 1))})")


def to_scalar(d: Draft) -> None:
    d.define(f"{d.pick(is_float)}.{d.one('sum', 'mean')}()")


def normalised(d: Draft) -> None:
    x = d.pick(lambda t: is_single(t) and t.dim() >= 1)
    columns = d.values[x].shape[-1]
    affine = f", {d.weight(columns)}, {d.weight(columns)}" if d.number(0, 1) else ""
    d.define(f"F.layer_norm({x}, ({columns},){affine})")


def softmax(d: Draft) -> None:
    x = d.pick(is_float)
    d.define(f"{x}.{d.one('softmax', 'log_softmax', 'cumsum')}({d.dim(x)})")


def cast(d: Draft) -> None:
    x = d.pick(lambda t: not t.is_complex())
    d.define(
        f"{x}.{d.one('bfloat16', 'bfloat16', 'float', 'double', 'int', 'long')}()" if d.number(0, 2) else f"{x}.float()"
    )


def mask(d: Draft) -> None:
    x = d.pick(lambda t: not t.is_complex())
    d.define(f"{x} > {d.one(0, 0.5)}")


def masked(d: Draft) -> None:
    m = d.pick(lambda t: t.dtype == torch.bool)
    x = d.pick(lambda t: is_float(t) and broadcasts(d.values[m].shape, t.shape))
    d.define(
        d.one(
            f"torch.where({m}, {x}, {x} * 2)", f"{x}.masked_fill({m}, 0.5)", f"{x} * {m}", f"torch.where({m}, 0.0, {x})"
        )
    )


def integer(d: Draft) -> None:
    x = d.pick(is_integer)
    d.define(d.one(f"{x} & 255", f"{x} + 1", f"{x} % 7", f"({x} % 7).float()"))


def integer_factor(d: Draft) -> None:
    """Integers that the backward reads."""
    x = d.pick(is_integer)
    y = d.pick(lambda t: is_float(t) and broadcasts(t.shape, d.values[x].shape))
    d.define(f"{y} * {d.one(x, f'({x} % 5)')}")


def two_results(d: Draft) -> None:
    x = d.pick(lambda t: is_single(t) and t.dim() >= 1 and t.numel() > 0)
    dim = d.dim(x)
    k = d.number(1, d.values[x].shape[dim])
    call = d.one(f"topk({k}, {dim})", f"max({dim})", f"sort({dim})", f"cummax({dim})", f"median({dim})", f"min({dim})")
    d.define(f"{x}.{call}", 2)


def moments(d: Draft) -> None:
    x = d.pick(lambda t: is_single(t) and t.dim() >= 1)
    d.define(f"torch.{d.one('std_mean', 'var_mean')}({x}, dim={d.dim(x)}, keepdim=True)", 2)


def embedding(d: Draft) -> None:
    rows = d.number(1, 6)
    index = d.input("index", *d.one((3,), (2, 3), ()), high=rows)
    d.define(f"F.embedding({index}, {d.weight(rows, d.number(1, 8))})")


def indexed(d: Draft) -> None:
    x = d.pick(lambda t: is_float(t) and t.dim() >= 1 and t.shape[0] > 0)
    index = d.input("index", d.number(1, 4), high=d.values[x].shape[0])
    d.define(d.one(f"{x}[{index}]", f"{x}.index_select(0, {index})"))


def gathered(d: Draft) -> None:
    """Indices that a topk or a sort found."""
    i = d.pick(lambda t: t.dtype == torch.int64 and t.dim() >= 1)
    x = d.pick(lambda t: is_float(t) and t.dim() == d.values[i].dim())
    d.define(f"{x}.gather({d.dim(x)}, {i})")


def repeated(d: Draft) -> None:
    """What an earlier line has, once more, or a view of that: PyTorch's min-cut merges the two."""
    lines = [line.partition(" = ")[2] for line in d.lines if re.match(r"v\d+ = ", line)]
    d.define(f"({d.one(*reversed(lines))}){d.one('', '.unsqueeze(0)', '.flatten()', '.unbind(-1)[0]')}")


COMPUTATIONS = (
    pointwise, activation, binary, spread, constant, matmul, self_matmul, linear, reduction, to_scalar, normalised,
    softmax, cast, mask, masked, integer, integer_factor, two_results, moments, embedding, indexed, gathered, repeated,
)  # fmt: skip
# Simplest first, because that is where a failing program shrinks to; what is repeated comes more often.
OPERATORS = (*COMPUTATIONS, *VIEWS, *CHANGES, matmul, matmul, binary, cast, spread, *CHANGES)
