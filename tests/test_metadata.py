"""Operators whose kernels return another dtype or other strides than their metadata (fake implementations) promise.

Autograd saves what the kernel returned. So does ssd_fx, wherever the value comes from when the backward wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.library import Library

import ssd_fx
from tests import fresh, sources
from tests.bitwise import Compile, differences, ours, prove_bitwise, run, stock

Kernel = Callable[[Tensor], Tensor]
# What `kernel` returns for a float32 matrix, and what the metadata promises of it.
KERNELS: dict[str, tuple[Kernel, Kernel]] = {
    "wider": (lambda x: x.double(), lambda x: x),
    "narrower": (lambda x: x.bfloat16(), lambda x: x),
    "another_half": (lambda x: x.bfloat16(), lambda x: x.half()),
    "transposed": (lambda x: x.t().contiguous().t(), lambda x: x),
    "gaps": (lambda x: torch.cat([x, x], 1)[:, : x.shape[1]], lambda x: x),
    "huge_gaps": (lambda x: torch.stack([x, torch.full_like(x, 1e30)], -1)[..., 0], lambda x: x),
    "offset": (lambda x: torch.cat([x, x])[x.shape[0] :], lambda x: x),
    "overlapping": (lambda x: x[:, :1].clone().expand(x.shape), lambda x: x),
}


@contextmanager
def library() -> Iterator[None]:
    made = Library("unlike", "FRAGMENT")
    for name, (kernel, promised) in KERNELS.items():
        made.define(f"{name}(Tensor x) -> Tensor")
        made.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(
            f"unlike::{name}", lambda x, f=promised: torch.empty_like(f(x.new_empty(x.shape))), lib=made
        )
        torch.library.register_autograd(
            f"unlike::{name}",
            _backward,
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
            lib=made,
        )
    yield
    made._destroy()


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    with library():
        yield


def _backward(ctx: object, grad: Tensor) -> Tensor:
    (saved,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return (grad.float() * saved.float().sin()).float()


def step(name: str) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        return getattr(torch.ops.unlike, name)(x * 2).float().sum()  # type: ignore[no-any-return]

    return f


def trained(
    f: Callable[[Tensor], Tensor], *shared: Tensor, dtype: torch.dtype = torch.float32
) -> Callable[[Compile], list[Tensor]]:
    """A program (`tests/bitwise.py`): the loss and the gradients of the input and of `shared`, after one step."""

    def program(compile: Compile) -> list[Tensor]:
        x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        loss = compile(f)(x)
        return [loss.detach(), *torch.autograd.grad(loss, [x, *shared])]

    return program


STOCK_AND_OURS = (stock("aot_eager"), ours(sources.OPTIONS))


@pytest.mark.parametrize("name", KERNELS)
def test_the_backward_gets_what_the_kernel_returned(name: str) -> None:
    prove_bitwise(trained(step(name)), STOCK_AND_OURS, sources.ALL)


READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": lambda y, w: (y.clone() @ w).sum() + (y * y).sum(),
    "copy_of_transposed": lambda y, w: (y.t().clone().t() @ w).sum() + (y * y).sum(),
    "slice": lambda y, w: (y[32:] @ w).sum() + (y * y).sum(),
    "transposed_view": lambda y, w: (w.t() @ y.t()).sum() + (y * y).sum(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["transposed", "gaps", "offset", "overlapping"])
def test_members_of_what_the_kernel_returned(name: str, reader: str) -> None:
    """Copies and views of it are rebuilt from what is loaded."""
    w = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return READERS[reader](getattr(torch.ops.unlike, name)(x * 2), w)

    program = trained(f, w)
    expected = run(program, stock("aot_eager"))
    for source in sources.ALL:
        with source.forced():
            found = program(ours(sources.OPTIONS))
            source.check(ssd_fx.stats())
        # A product may add up in another order if a view has the strides that were promised.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=source.name)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_lossy_codec_does_not_see_what_lies_in_the_gaps(codec: str) -> None:
    """Those values would change the scale of their block. A tensor without gaps is compressed, whatever its strides."""
    options = sources.OPTIONS | {"engine": "memory", "compression": codec}
    for name, compressed in (("huge_gaps", False), ("transposed", True)):
        expected, found = (run(trained(step(name)), how) for how in (stock("aot_eager"), ours(options)))
        stats = ssd_fx.stats()
        assert stats.loads == 1
        assert (stats.encoded_from_bytes > 0) == compressed
        assert (differences(found, expected) == {}) == (not compressed)


def test_generated_code_for_another_dtype_is_refused() -> None:
    """Inductor's code would read the bits of one dtype as another one, behind the end of the memory too."""
    code = """
        import pytest, torch, ssd_fx
        from tests import sources
        from tests.inductor import kernels_on_demand
        from tests.bitwise import ours
        from tests.test_metadata import library, step, trained

        with library(), kernels_on_demand():
            for name in ("wider", "narrower", "another_half"):
                program = trained(step(name))
                for source in ("read", "given_away", "copied"):
                    refused = pytest.raises(RuntimeError, match=r"a tensor of torch\\..*compiled for")
                    with sources.SOURCES[source].forced(), refused:
                        program(ours(sources.OPTIONS, inner="inductor"))
        print("fine")
    """
    done = fresh.run(code)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


@pytest.mark.parametrize("autocast", [False, True])
def test_layer_norm_of_bfloat16_with_float32_weights(autocast: bool) -> None:
    """Its metadata say that mean and rstd are bfloat16; the kernel returns float32."""
    weights = [torch.randn(64, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in range(2)]

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.nn.functional.layer_norm(x, (64,), *weights).sin().float().sum()

    prove_bitwise(trained(f, *weights, dtype=torch.bfloat16), STOCK_AND_OURS, sources.ALL)
