"""What writing does to drives, and figures about it as text."""

from __future__ import annotations

from decimal import Decimal

DAY_S = 86400


def rated_days(tbw: float, bytes_s: float) -> float:
    """Days of writing `bytes_s` until new drives have written what they are rated for, `tbw` times 10^12 bytes."""
    return tbw * 1e12 / (bytes_s * DAY_S)


def format_bytes(nbytes: float) -> str:
    """`256 B`, exact, below a MiB; above it four digits: `1.5 MiB`, `11.25 GiB`, `13.92 TiB`."""
    for unit, size in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{int(nbytes)} B"


def digits(value: float, count: int = 3) -> str:
    """So many digits, and never an exponent: `0.0906`, `52.3`, `6620`."""
    return f"{Decimal(f'{value:.{count}g}'):f}"


def format_days(days: float) -> str:
    """`2.7 years`, `40.7 days`, `3.1 hours`."""
    if days >= 365:
        return f"{digits(days / 365)} years"
    return f"{digits(days)} days" if days >= 1 else f"{digits(24 * days)} hours"


def wear(tbw: float, bytes_s: float) -> tuple[str, str]:
    """What drives get in a day at this speed, and how long they last, as text. `tbw`: 0 if it is not known."""
    life = "the option drive_tbw says how long drives last"
    if tbw:
        life = f"new drives rated for {tbw:g} TB last {format_days(rated_days(tbw, bytes_s))}"
    return f"{digits(bytes_s * DAY_S / 1e12)} TB", life
