"""Checks of what a user gives. Each message names the value and what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST = 10**9  # of anything that is counted; far beyond, products are no floats any more


def whole(name: str, value: int, least: int = 1) -> None:
    """Raises:
    ValueError: `value` is below `least` or above `MOST`.
    """
    if value < least:
        raise ValueError(f"{name}={value} is too small; right would be a whole number from {least} on")
    if value > MOST:
        raise ValueError(f"{name}={value} is too large; right would be at most {MOST}")


def positive(name: str, value: float, unit: str) -> None:
    """Raises:
    ValueError: `value` is not a finite number above 0.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value:g} is not possible; right would be a number of {unit} above 0")


def divides(name: str, divisor: int, of: str, number: int) -> None:
    """Raises:
    ValueError: `divisor` does not divide `number`; the message has the numbers that do.
    """
    if number % divisor:
        right = ", ".join(map(str, _divisors(number)))
        raise ValueError(f"{name}={divisor} does not divide {of}={number}; right would be one of {right}")


def one_of(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises:
    ValueError: `value` is none of `choices`.
    """
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; right would be one of {', '.join(known)}")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]
