"""Custom operators whose fake implementation shares memory with an argument, though the real one returns a new tensor.

`x.contiguous()` is a usual way to write a fake one, and PyTorch and Inductor accept it. By the FakeTensors alone the
result and the argument were one tensor, and the backward got the wrong one of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ssd_fx
from tests import sources
from tests.models import assert_same_bits
from tests.passes import toys

FAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1).reshape(x.shape),
    "detach": lambda x: x.detach(),
    "to": lambda x: x.to(torch.float32),
}
OPTIONS = sources.OPTIONS | {"inner": "aot_eager"}


def shifted(name: str) -> Callable[[Tensor], Tensor]:
    """sin(x) + 1, whose derivative is wrongly but visibly the result itself."""

    @torch.library.custom_op(f"untrue_fakes::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.sin() + 1

    op.register_fake(FAKES[name])
    op.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=_saves_its_output)
    return op


def _saves_its_output(ctx: torch.autograd.function.FunctionCtx, inputs: object, output: object) -> None:
    ctx.save_for_backward(*(output if isinstance(output, tuple) else (output,)))


SHIFTED = {name: shifted(name) for name in FAKES}


@torch.library.custom_op("untrue_fakes::two", mutates_args=())
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@both.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty_like(x)
    return made, made.view(made.shape)


def _of_both(ctx: torch.autograd.function.FunctionCtx, to_sin: Tensor, to_cos: Tensor) -> Tensor:
    sin, cos = ctx.saved_tensors  # type: ignore[attr-defined]
    return to_sin * cos - to_cos * sin


both.register_autograd(_of_both, setup_context=_saves_its_output)


def gradients(toy: toys.Toy) -> list[Tensor]:
    x, w = toys.inputs()
    return list(torch.autograd.grad(toy(x, w), (x, w)))  # type: ignore[arg-type]


def of_every_source(toy: toys.Toy) -> None:
    kept = gradients(torch.compile(toy, backend="aot_eager"))
    torch._dynamo.reset()
    compiled = torch.compile(toy, backend=ssd_fx.backend, options=OPTIONS)
    for source in sources.ALL:
        with source.forced():
            found = gradients(compiled)
        assert_same_bits(found, kept)


@pytest.mark.parametrize("name", FAKES)
def test_the_result_is_not_the_argument(name: str) -> None:
    """Only the result is saved: its storage seemed to be made by the product before."""
    of_every_source(lambda x, w: SHIFTED[name](x @ w).sum())


@pytest.mark.parametrize("name", FAKES)
def test_result_and_argument_are_two_tensors(name: str) -> None:
    """Both are saved: they seemed to be one group, of which one tensor was stored."""

    def toy(x: Tensor, w: Tensor) -> Tensor:
        product = (x @ w).sigmoid()
        return product.square().sum() + SHIFTED[name](product).sum()

    of_every_source(toy)


def test_two_results_are_two_tensors() -> None:
    def toy(x: Tensor, w: Tensor) -> Tensor:
        sin, cos = both(x @ w)
        return (2 * sin + 3 * cos).sum()

    of_every_source(toy)


def test_the_dump_says_why_they_stay() -> None:
    (found,) = ssd_fx.explain(lambda x, w: SHIFTED["contiguous"](x @ w).sum(), options=OPTIONS)(*toys.inputs()).dumps
    assert "aliases disagree" in found.table
