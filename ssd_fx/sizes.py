"""Sizes as options and as text."""

from __future__ import annotations

import math
import numbers
import re

from ssd_fx.runtime.wear import DAY_S, format_days
from ssd_fx.runtime.wear import format_bytes as format_bytes

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # 1.5G is 1.5 GiB, as for dd, systemd and docker
_UNITS |= _BINARY | {f"{letter}ib": size for letter, size in _BINARY.items()}
_ASKS_BELOW = 2**20  # a bare number so small is hardly meant as bytes


def format_seconds(seconds: float) -> str:
    """`3.1 hours`, `20 min`, `4.9 s`, `120 ms`, `0 ms`."""
    if seconds >= 3600:
        return format_days(seconds / DAY_S)
    if seconds >= 600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"


def parse_tbw(name: str, value: object) -> float:
    """The rated endurance of drives as a number of TB, 10^12 bytes; 0 if it is not known.

    Raises:
        ValueError: no number of TB.
    """
    try:
        tbw = -1.0 if isinstance(value, bool) else float(value)  # type: ignore[arg-type] # a TypeError is caught
    except (TypeError, ValueError, OverflowError):
        tbw = -1.0
    if not 0 <= tbw < math.inf:
        raise ValueError(f"option {name}={value!r} is no number of TB; right would be e.g. 600, or 0 if not known")
    return tbw


def parse_bytes(name: str, value: object) -> int:
    """The bytes of a size such as `"2GiB"`, `"1.5G"` (GiB as well), `"512MB"` or `4096`.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 0:  # NumPy's too
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            nbytes = float(match[1]) * _UNITS[match[2].lower()]
            if nbytes < math.inf:
                return int(nbytes)
    raise ValueError(
        f"option {name}={value!r} is not a size; right would be a number of bytes or e.g. '512MiB' or '2GB'"
    )


def parse_positive(name: str, value: object) -> int:
    """The bytes of a size above 0.

    Raises:
        ValueError: not a size, or 0.
    """
    nbytes = parse_bytes(name, value)
    if not nbytes:
        raise ValueError(f"option {name}={value!r} lets nothing be written; right would be e.g. '128MiB'")
    return nbytes


def parse_share(name: str, value: object) -> float:
    """A share such as 0.05 or "5%".

    Raises:
        ValueError: something else, less than 0, or more than 1.
    """
    text = str(value).strip()
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    try:
        share = float(percent[1]) / 100 if percent else float(text)
    except ValueError:
        share = -1.0
    if isinstance(value, bool) or not 0.0 <= share <= 1.0:
        raise ValueError(f"option {name}={value!r} is not a share; right would be 0 to 1, such as 0.05 or '5%'")
    return share


def parse_budget(name: str, value: object) -> int | float | str:
    """A share (`0.25`, `"25%"`) as a float, a size as bytes (int), or "auto".

    Raises:
        ValueError: none of these, or a small number without a unit, which may be meant as MiB or percent.
    """
    right = (
        f"option {name}={value!r} is not a budget; "
        "right would be a size such as '2GiB', a share from 0.0 to 1.0 such as 0.25 or '25%', or 'auto'"
    )
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return "auto"
        share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
        if share:
            value = float(share[1]) / 100
        elif re.fullmatch(r"\d*\.\d+", text):
            value = float(text)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        value = float(value)
        if 0.0 <= value <= 1.0:
            return value
        hint = f"; as bytes it would be {int(value)}" if value.is_integer() and value > 1 else ""
        raise ValueError(right + hint)
    try:
        nbytes = parse_bytes(name, value)
    except ValueError:
        raise ValueError(right) from None
    bare = str(value).strip()
    if 0 < nbytes < _ASKS_BELOW and bare.isdecimal():
        shares = "1.0 to keep everything" if nbytes == 1 else f"'{bare}%'" if nbytes <= 100 else "a share such as '25%'"
        sizes = f"'{bare}MiB', '{bare}GiB', or '{bare}B' if bytes are meant"
        raise ValueError(f"option {name}={value!r} has no unit: of what? Right would be {sizes}, or {shares}")
    return nbytes


def parse_memory(name: str, value: object) -> int | float | str:
    """A limit of a device's memory: bytes (int), a share of what it has as a float, or "auto".

    Raises:
        ValueError: none of these, nothing at all, or a number without a unit below a MiB.
    """
    try:
        found = parse_budget(name, value)
    except ValueError:
        found = 0
    if not found:
        raise ValueError(
            f"option {name}={value!r} is no limit of memory; right would be a size such as '24GiB', a share of the "
            "device such as '90%', or 'auto'"
        )
    return found
