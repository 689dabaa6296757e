"""Two trials are equal in every bit or they are not: neither nan nor a sign of zero is lost in a maximum."""

from __future__ import annotations

import math

import pytest
import torch

from tests.zoo.trial import Trial

NAN = float("nan")


def trial(*values: torch.Tensor) -> Trial:
    return Trial({str(i): value for i, value in enumerate(values)}, 0, 0, 0, 0, 0)


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("ours", "difference"),
    [
        (ONE, 0.0),
        (torch.tensor([1.0, 1.5]), 0.5),
        (torch.tensor([1.0, NAN]), math.inf),
        (torch.tensor([1.0, math.inf]), math.inf),
        (ONE.double(), math.inf),
        (torch.ones(3), math.inf),
    ],
)
def test_the_largest_difference(ours: torch.Tensor, difference: float) -> None:
    assert trial(ONE, ours).difference(trial(ONE, ONE)) == difference


@pytest.mark.parametrize(
    ("change", "close"),
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
def test_what_is_close(change: dict[str, torch.Tensor], close: bool) -> None:
    values = {"0 large": 1000 * ONE, "0 small": ONE, "0 zero": 1e-4 * ONE, "1 large": 1000 * ONE}
    assert Trial(values | change, 0, 0, 0, 0, 0).close_to(Trial(values, 0, 0, 0, 0, 0)) == close


def test_equal_nans_are_equal() -> None:
    assert trial(torch.tensor([NAN])).difference(trial(torch.tensor([NAN]))) == 0.0


def test_zeros_of_unlike_signs_differ() -> None:
    assert trial(torch.tensor([-0.0])).difference(trial(torch.tensor([0.0]))) > 0.0


def test_what_differs_is_named() -> None:
    ours = Trial({"0 loss": ONE, "0 weight": 2 * ONE, "0 bias": ONE}, 0, 0, 0, 0, 0)
    theirs = Trial({"0 loss": ONE, "0 weight": ONE}, 0, 0, 0, 0, 0)
    assert ours.apart(theirs) == theirs.apart(ours) == {"0 weight": 1.0, "0 bias": math.inf}
