"""Checks of what a user gives. Each message names the value and what would be right."""

from __future__ import annotations

MOST = 10**9  # of anything that is counted or measured; far beyond, products are no floats any more
LEAST = 1e-9  # of anything that is measured; far below, quotients are none


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
    ValueError: `value` is not between `LEAST` and `MOST`.
    """
    if not LEAST <= value <= MOST:
        right = f"a number of {unit} above 0, from {LEAST:g} to {MOST:g}"
        raise ValueError(f"{name}={value:g} is not possible; right would be {right}")


def price(value: float) -> None:
    """Raises:
    ValueError: `value` is neither 0 nor a price up to `MOST`.
    """
    if not 0 <= value <= MOST:
        right = f"US dollars up to {MOST:g}, or 0 if it is not known"
        raise ValueError(f"price={value:g} is not a price; right would be {right}")


def divides(name: str, divisor: int, of: str, number: int) -> None:
    """Raises:
    ValueError: `divisor` does not divide `number`; the message has the numbers that do.
    """
    if number % divisor:
        right = ", ".join(map(str, _divisors(number)))
        raise ValueError(f"{name}={divisor} does not divide {of}={number}; right would be one of {right}")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 1024) + 1) if number % n == 0]
