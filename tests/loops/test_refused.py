"""`torch.func` and second derivatives: what stock does is what we do, the same results or the same refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import ssd_fx
from tests.bitwise import Compile
from tests.compatibility import Result, record
from tests.loops.loops import Loop, assert_all_read_back, assert_no_bit_changes, backward, run

SIZE = 16
Outcome = tuple[str, Any]  # "value" and what came; or the type of what was raised, and its message


def curve(x: Tensor) -> Tensor:
    return (x @ x).sin().exp().sum()


def argument(*batch: int) -> Tensor:
    return torch.linspace(-1, 1, SIZE * SIZE).expand(*batch, -1).reshape(*batch, SIZE, SIZE).clone()


def outcome(attempt: Callable[[Callable[[Tensor], Tensor]], Any], compile: Compile, *, warm: bool) -> Outcome:
    """Of `attempt` with the compiled curve, which has run before if `warm`."""
    torch._dynamo.reset()
    compiled = compile(curve)
    if warm:
        compiled(argument().requires_grad_()).backward()
    try:
        return "value", attempt(compiled)
    except Exception as error:
        return type(error).__name__, str(error).split("\n", 1)[0]


def dual(compiled: Callable[[Tensor], Tensor]) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(compiled(forward_ad.make_dual(argument(), argument()))).tangent


OVER = {
    "grad": lambda f: torch.func.grad(f)(argument()),
    "vjp": lambda f: torch.func.vjp(f, argument())[1](torch.tensor(1.0))[0],
    "jvp": lambda f: torch.func.jvp(f, (argument(),), (argument(),))[1],
    "vmap": lambda f: torch.func.vmap(f)(argument(3)),
    "jacrev": lambda f: torch.func.jacrev(f)(argument()),
    "hessian": lambda f: torch.func.hessian(f)(argument()),
    "forward mode": dual,
}


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours[0] == theirs[0]
    if ours[0] == "value":
        torch.testing.assert_close(ours[1], theirs[1])
    else:
        assert ours[1] == theirs[1]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", OVER)
def test_transforms_over_a_compiled_function(tmp_path: Path, name: str, warm: bool) -> None:
    def ours(function: Any) -> Any:
        return torch.compile(
            function, backend="ssd_fx", options={"dirs": [str(tmp_path)], "inner": "aot_eager", "min_bytes": 0}
        )

    found = outcome(OVER[name], ours, warm=warm)
    assert ssd_fx.stats().stores == (3 if warm else 0)  # the run before is offloaded; under a transform eager mode runs
    assert_same(found, outcome(OVER[name], lambda f: torch.compile(f, backend="aot_eager"), warm=warm))


def summed(transformed: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Loop:
    """The gradient of what a transform, compiled, returns."""

    def loop(compile: Compile) -> list[Tensor]:
        x = argument(*shape).requires_grad_()
        loss = compile(lambda y: transformed(y).sin().sum())(x)
        backward(loss)
        assert x.grad is not None
        return [loss.detach(), x.grad]

    return loop


WITHIN: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "grad": (torch.func.grad(curve), ()),
    "vmap": (torch.func.vmap(curve), (3,)),
    "jvp": (lambda x: torch.func.jvp(curve, (x,), (torch.ones_like(x),))[1], ()),
    "jacrev": (torch.func.jacrev(curve), ()),
}


@pytest.mark.parametrize("name", WITHIN)
def test_transforms_within_a_compiled_function(tmp_path: Path, name: str) -> None:
    """They are traced away, and what the outer backward needs is offloaded as any other tensor."""
    transformed, shape = WITHIN[name]
    stats = assert_no_bit_changes(summed(transformed, shape), tmp_path)
    assert_all_read_back(stats)
    found = run(summed(transformed, shape), tmp_path)
    eager = summed(transformed, shape)(lambda f: f)
    for ours, theirs in zip(found, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("donated", [False, True])
def test_a_second_derivative_is_refused_as_stock_does(tmp_path: Path, donated: bool) -> None:
    """Not when the first is taken with `create_graph`, but when the second is asked for."""

    def attempt(compile: Compile, *, second: bool) -> Outcome:
        torch._dynamo.reset()
        x = argument().requires_grad_()
        with torch._functorch.config.patch(donated_buffer=donated):
            compiled = compile(curve)
            (first,) = torch.autograd.grad(compiled(x), x, create_graph=True)
            try:
                if second:
                    first.sum().backward()
                return "value", first.detach()
            except RuntimeError as error:
                return type(error).__name__, str(error)

    options = {"dirs": [str(tmp_path)], "inner": "aot_eager", "min_bytes": 0}
    for second in (False, True):
        ssd_fx.reset_stats()
        ours = attempt(lambda f: torch.compile(f, backend="ssd_fx", options=options), second=second)
        assert ssd_fx.stats().loads == ssd_fx.stats().stores == 3
        assert_same(ours, attempt(lambda f: torch.compile(f, backend="aot_eager"), second=second))
    assert ours[0] == "RuntimeError"
    refusals = ("does not currently support double backward", "does not require grad")  # the latter of torch 2.11
    assert any(refusal in ours[1] for refusal in refusals)
    record(Result("ways of working", "gradient penalty", "aot_eager", reason="PyTorch: no double backward"))
