"""Which versions of torch this package knows. Imports nothing else of the package, and of torch its version alone."""

from __future__ import annotations

import os
import re
import warnings

import torch

FIRST, LAST = (2, 11), (2, 15)  # as in pyproject.toml
ANYWAY = "SSD_FX_ANY_TORCH"


def check(version: str) -> None:
    """Refuse a torch whose private parts are not known to be what the passes take them for.

    pip says so too, but not to those who install torch afterwards or with `--no-deps`. With `SSD_FX_ANY_TORCH=1` in the
    environment it is a warning, for trying a new release.

    Raises:
        ImportError: `version` is outside of the known ones; the message names both.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and FIRST <= (int(found[1]), int(found[2])) <= LAST:
        return
    told = f"ssd_fx knows torch {_name(FIRST)} to {_name(LAST)}, and this is torch {version}"
    if os.environ.get(ANYWAY) != "1":
        raise ImportError(f"{told}: install one of those, or set {ANYWAY}=1 to try this one, at your own risk")
    warnings.warn(f"{told}, which {ANYWAY}=1 lets through: compare gradients", RuntimeWarning, stacklevel=2)


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


check(torch.__version__)
