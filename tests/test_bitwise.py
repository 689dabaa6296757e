"""The oracle tells values of the same bits from others, and proves nothing by comparing none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ssd_fx
from tests import sources
from tests.bitwise import Compile, assert_same_bits, differences, kept, ours, prove_bitwise, run
from tests.passes import toys
from tests.zoo.trial import near

ONE, NAN = torch.ones(2), float("nan")


@pytest.mark.parametrize(
    ("found", "apart"),
    [
        (ONE, None),
        (torch.tensor([1.0, 1.5]), 0.5),
        (torch.tensor([1.0, NAN]), math.inf),
        (torch.tensor([1.0, math.inf]), math.inf),
        (torch.complex(ONE, ONE), math.inf),
        (ONE.double(), math.inf),
        (torch.ones(3), math.inf),
        (torch.ones(4)[::2], math.inf),
        (None, math.inf),
    ],
)
def test_how_far_a_value_is_from_ones(found: Tensor | None, apart: float | None) -> None:
    assert differences([ONE, found], [ONE, ONE]) == ({} if apart is None else {"1": apart})


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([NAN]), torch.tensor([-NAN]), True),
        (torch.tensor([-0.0]), torch.tensor([0.0]), False),
        (torch.tensor([1.0 + 2.0j]).conj(), torch.tensor([1.0 - 2.0j]), True),
        (ONE.to_sparse(), ONE.to_sparse(), True),
        (ONE.to_sparse(), (2 * ONE).to_sparse(), False),
        (ONE.to_sparse(), ONE, False),
        (ONE.to(torch.float8_e4m3fn), (2 * ONE).to(torch.float8_e4m3fn), False),
        (ONE > 0, ONE > 0, True),
        (ONE > 0, ONE > 1, False),
        (None, None, True),
    ],
)
def test_the_same_bits(a: Tensor | None, b: Tensor | None, same: bool) -> None:
    assert (differences([a], [b]) == {}) == same


def test_what_differs_is_named() -> None:
    found, expected = {"loss": ONE, "weight": 2 * ONE, "bias": ONE}, {"loss": ONE, "weight": ONE}
    assert differences(found, expected) == differences(expected, found) == {"weight": 1.0, "bias": math.inf}
    with pytest.raises(AssertionError, match=r"from the drive: 2 of 2 values differ.*'weight': 1\.0"):
        assert_same_bits(found, expected, "from the drive")
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_same_bits([], [])


@pytest.mark.parametrize(
    ("change", "is_near"),
    [
        ({}, True),
        ({"0 small": 1.001 * ONE}, True),
        ({"0 small": 1.004 * ONE}, False),
        ({"0 zero": 8e-4 * ONE}, True),  # a millionth of the largest value
        ({"0 zero": 8e-3 * ONE}, False),
        ({"1 large": 2000 * ONE}, True),  # a later step
        ({"0 more": ONE}, False),
    ],
)
def test_what_is_near(change: dict[str, Tensor], is_near: bool) -> None:
    values = {"0 large": 1000 * ONE, "0 small": ONE, "0 zero": 1e-4 * ONE, "1 large": 1000 * ONE}
    assert near(values | change, values) == is_near


def one_bit_more(program: Callable[[Compile], list[Tensor]], at: int) -> Callable[[Compile], list[Tensor]]:
    """The same program, whose run number `at` has another bit in its last value."""
    runs = 0

    def faulty(compile: Compile) -> list[Tensor]:
        nonlocal runs
        runs += 1
        *values, last = program(compile)
        if runs == at:
            last.view(torch.int32).flatten()[-1] ^= 1
        return [*values, last]

    return faulty


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_bit_that_differs_under_any_compiler_is_found(at: int) -> None:
    compilers = [kept(sources.OPTIONS), ours(sources.OPTIONS, engine="memory"), ours(sources.OPTIONS)]
    with pytest.raises(AssertionError, match="1 of 3 values differ"):
        prove_bitwise(one_bit_more(toys.trained(toys.relu_chain), at), compilers)


def test_a_bit_that_differs_from_any_source_is_found() -> None:
    compilers, two = [kept(sources.OPTIONS), ours(sources.OPTIONS)], sources.ALL[:2]
    for at, source in enumerate(two, 2):
        with pytest.raises(AssertionError, match=f"from {source.name}: 1 of 3 values differ"):
            prove_bitwise(one_bit_more(toys.trained(toys.relu_chain), at), compilers, two)
    prove_bitwise(toys.trained(toys.relu_chain), compilers, two)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_is_kept_comes_from_no_drive(inner: str) -> None:
    """Or two runs of one way would be compared."""
    options = sources.OPTIONS | {"inner": inner, "engine": "posix"}
    run(toys.trained(toys.relu_chain), kept(options))
    assert (ssd_fx.stats().stores == 0) == (inner == "aot_eager")
    assert ssd_fx.stats().disk_bytes == 0
    run(toys.trained(toys.relu_chain), ours(options))
    assert ssd_fx.stats().disk_bytes > 0
