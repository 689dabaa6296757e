"""Custom operators whose fake implementation shares memory with an argument, though the real one returns a new tensor.

`x.contiguous()` is a usual way to write a fake one, and PyTorch and Inductor accept it. By the FakeTensors alone the
result and the argument were one tensor, and the backward got the wrong one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import ssd_fx
from ssd_fx.passes import pipeline
from tests import sources
from tests.bitwise import assert_same_bits, ours, prove_bitwise, stock
from tests.passes import toys

FAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),  # the argument itself
    "reshape": lambda x: x.reshape(-1).reshape(x.shape),  # a view of it
}
OPTIONS = sources.OPTIONS | {"inner": "aot_eager"}


def shifted(name: str) -> Callable[[Tensor], Tensor]:
    """sin(x) + 1. Its gradient is made of the result, which is wrong as a derivative, and shows which tensor came."""

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


def quantized(then: Callable[[Tensor], Tensor]) -> toys.Toy:
    """x @ w, twice. A quantized x is saved for the backward, of which PyTorch's FakeTensor says that it has floats."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(then(torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)), w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.dequantize().view(grad.shape[0], -1).t() @ grad

    def toy(x: Tensor, w: Tensor) -> Tensor:
        return Product.apply(Product.apply(x, w).tanh(), w).sum()  # type: ignore[no-untyped-call, no-any-return]

    return toy


@pytest.mark.parametrize(
    ("inner", "then"),
    [
        ("inductor", lambda q: q),
        ("aot_eager", lambda q: q),
        ("aot_eager", lambda q: q.relu().view(-1)),  # plain Inductor reads such a relu as one of floats
    ],
)
def test_a_quantized_tensor_stays_in_memory(inner: str, then: Callable[[Tensor], Tensor]) -> None:
    """A load would need its scale and zero point too, and a stand-in of its dtype, which PyTorch cannot make."""
    prove_bitwise(toys.trained(quantized(then)), [stock(inner), ours(OPTIONS, inner=inner)])


def of_every_source(toy: toys.Toy) -> None:
    """Beside the toy, whose tensors may all stay, something is stored."""

    def toy_and_more(x: Tensor, w: Tensor) -> Tensor:
        return toy(x, w) + (w @ x).sin().sum()

    prove_bitwise(toys.trained(toy_and_more), [stock("aot_eager"), ours(OPTIONS)], sources.ALL)


@pytest.mark.parametrize("name", FAKES)
def test_the_result_is_not_the_argument(name: str) -> None:
    """Only the result is saved. The product before it seemed to own the result's memory, so the product was stored."""
    of_every_source(lambda x, w: SHIFTED[name](x @ w).sum())


@pytest.mark.parametrize("name", FAKES)
def test_result_and_argument_are_two_tensors(name: str) -> None:
    """Both are saved. They seemed to be one group, so one of them was stored for both."""

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


@torch.library.custom_op("untrue_fakes::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


doubled.register_fake(lambda x: x.contiguous())
doubled.register_autograd(lambda ctx, grad: 2 * grad)


def test_recomputing_the_argument_does_not_run_the_operator_again() -> None:
    """Views of what is computed again are tagged with it, and the result seems to be one."""

    def toy(x: Tensor, w: Tensor) -> Tensor:
        return doubled((x @ w).relu().view(-1)).exp().sum()

    def tagged(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> set[str]:
        joint = pipeline.joint_of(gm, inputs, kwargs)
        joint.partition()
        with mock.patch.object(joint, "_cut", return_value=(gm, gm)) as cut, mock.patch.object(joint, "_partition"):
            joint.partition_again({"relu"}, ())
        (module,) = cut.call_args.args
        return {n.name for n in module.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE}

    found = toys.with_joint(toy, toys.inputs(), tagged)
    assert {"relu", "view"} <= found
    assert "doubled" not in found


@torch.library.custom_op("untrue_fakes::ramp", mutates_args=())
def ramp(x: Tensor) -> Tensor:
    return x.contiguous() * torch.arange(x.numel(), dtype=x.dtype).view(x.shape)


@ramp.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


ramp.register_autograd(lambda ctx, grad: grad * torch.arange(grad.numel(), dtype=grad.dtype).view(grad.shape))


def test_a_fake_result_that_is_expanded_is_stored_whole_or_not_at_all() -> None:
    """The stride of 0 is the argument's: of the result, which has other rows, only the first one was stored."""
    row, w = (torch.randn(n, 8, requires_grad=True) for n in (1, 8))
    compiled = torch.compile(lambda row, w: (ramp(row.expand(8, 8)) * w).sum(), backend=ssd_fx.backend, options=OPTIONS)
    compiled(row, w).backward()
    assert_same_bits([ramp(row.detach().expand(8, 8))], [w.grad])
