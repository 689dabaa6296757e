"""The oracle of the tests of numbers: a program computes the same bits, whoever compiles it, from wherever values come.

    def program(compile: Compile) -> list[Tensor]:
        model = Net()
        compile(model)(batch()).backward()
        return [p.grad for p in model.parameters()]

    prove_bitwise(program, [kept(options), ours(options)])
    prove_bitwise(program, [kept(sources.OPTIONS), ours(sources.OPTIONS)], sources.ALL)

A program trains something of its own, through the `compile` that it is given, and returns all that has to be the same.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

import ssd_fx

if TYPE_CHECKING:
    from tests.sources import Source

Compile = Callable[..., Any]  # `torch.compile` with its backend and options given, or what takes its place
Value = Tensor | int | None
Values = Sequence[Value] | Mapping[str, Value]
T = TypeVar("T", bound=Values)


def stock(inner: str) -> Compile:
    """PyTorch alone."""
    return partial(torch.compile, backend=inner)


def eager(module: Any, **_: Any) -> Any:
    """What was to be compiled, as it is."""
    return module


def ours(options: Mapping[str, Any], **more: Any) -> Compile:
    return partial(torch.compile, backend="ssd_fx", options={**options, **more})


def kept(options: Mapping[str, Any], **more: Any) -> Compile:
    """Ours with everything in memory. With inner="aot_eager" nothing is stored. Inductor makes other kernels of such a
    graph, which round otherwise. So there the same graph runs on the engine in memory, which moves no bytes."""
    inner = {**options, **more}.get("inner", "inductor")
    stay = {"engine": "memory"} if inner == "inductor" else {"budget": 1.0, "recompute": False}
    return ours(options, **{**more, **stay})


@contextlib.contextmanager
def by_name(compile: Compile) -> Iterator[str]:
    """The name of the backend; its options are in the environment meanwhile."""
    how = compile.keywords  # type: ignore[attr-defined]
    options = how.get("options", {}).items()
    texts = {f"SSD_FX_{name.upper()}": ":".join(x) if isinstance(x, list) else str(x) for name, x in options}
    with mock.patch.dict(os.environ, texts):
        yield how["backend"]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Without it Inductor adds up embedding gradients with atomics: two runs of one graph differ in the last bit."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def run(program: Callable[[Compile], T], compile: Compile) -> T:
    """What `program` returns: from one seed, with code compiled afresh. The counters are then those of this run."""
    torch._dynamo.reset()
    ssd_fx.reset_stats()
    return _again(program, compile)


def _again(program: Callable[[Compile], T], compile: Compile) -> T:
    """With the code of the run before, where it fits."""
    torch.manual_seed(0)
    with deterministic():
        return program(compile)


def prove_bitwise(program: Callable[[Compile], T], compilers: Sequence[Compile], sources: Sequence[Source] = ()) -> T:
    """Under all `compilers` the program returns the same bits; returns those. The counters are of the last run.

    `sources`: the last compiler, whose options are those of `tests.sources`, runs once under each. Code that has been
    compiled serves all of them.

    Raises: AssertionError with what differs, and by how much; or where a value did not come from its source.
    """
    expected, *found = (run(program, compile) for compile in (compilers[:-1] if sources else compilers))
    for compile, values in zip(compilers[1:], found, strict=False):
        assert_same_bits(values, expected, f"under {compile}")
    for number, source in enumerate(sources):
        with source.forced(), torch._dynamo.config.patch(recompile_limit=100):
            values = (_again if number else run)(program, compilers[-1])
            source.check(ssd_fx.stats())
        assert_same_bits(values, expected, f"from {source.name}")
    return expected


def assert_same_bits(found: Values, expected: Values, where: str = "") -> None:
    assert len(expected) > 0, "there is nothing to compare"
    apart = differences(found, expected)
    first = dict(list(apart.items())[:5])
    assert not apart, f"{where}: {len(apart)} of {len(expected)} values differ, and are so far apart: {first}"


def differences(found: Values, expected: Values) -> dict[str, float]:
    """How far the values that are not the same bits are apart, by name or by number. Infinite where no number tells:
    for values of other sizes, strides or dtypes, of no number, or which only one of the two has."""
    a, b = (_by_name(values) for values in (found, expected))
    unlike = {name: _apart(a[name], b[name]) for name in b if name in a and not is_same(a[name], b[name])}
    return unlike | dict.fromkeys(sorted(a.keys() ^ b.keys()), math.inf)


def _by_name(values: Values) -> Mapping[str, Value]:
    return values if isinstance(values, Mapping) else {str(i): value for i, value in enumerate(values)}


def is_same(a: Value, b: Value) -> bool:
    """Size, strides, dtype, and every bit; but every NaN is every other one."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    return _form(a) == _form(b) and same_bits(a, b)


def _form(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.layout, x.stride() if x.layout == torch.strided else ()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """As `is_same`, whatever their strides are."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(_as_bits(a), _as_bits(b))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.dtype.is_floating_point:
        return x
    if x.itemsize > 1:
        x = x.masked_fill(x.isnan(), torch.nan)
    return x.contiguous().view(_INTEGERS[x.itemsize])


def _apart(a: Value, b: Value) -> float:
    """Of values that are not the same: never 0."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or _form(a) != _form(b) or a.is_complex():
        return math.inf
    apart = float((a.detach().to_dense().double() - b.detach().to_dense().double()).abs().max())
    return max(apart, math.ulp(0.0)) if math.isfinite(apart) else math.inf


def close(x: Tensor, y: Tensor, apart: float = 1e-3, least: float = 1e-7) -> bool:
    """Whether they are within what other kernels of the same operators make of float32: a share `apart` of each value,
    a tenth of that of the largest one, and `least`."""
    return torch.allclose(x, y, rtol=apart, atol=0.1 * apart * float(y.abs().max()) + least)
