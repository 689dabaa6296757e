"""Which versions of torch this package knows. It imports nothing else of the package."""

from __future__ import annotations

import os
import re
import warnings

import torch

FIRST, LAST = (2, 11), (2, 15)  # as in pyproject.toml
TESTED = (2, 13)  # regularly
ANYWAY = "SSD_FX_ANY_TORCH"


def check(version: str) -> None:
    """Refuse a torch whose private parts the passes do not know.

    pip refuses it too, but not if torch is installed afterwards or with `--no-deps`. With `SSD_FX_ANY_TORCH=1` in the
    environment it is only a warning, for trying a new release.

    Raises:
        ImportError: `version` is not a known one; the message names it and those.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and FIRST <= (int(found[1]), int(found[2])) <= LAST:
        return
    unknown = f"ssd_fx knows torch {_name(FIRST)} to {_name(LAST)}, and this is torch {version}"
    if os.environ.get(ANYWAY) != "1":
        raise ImportError(f"{unknown}: install one of those, or set {ANYWAY}=1 to try this one, at your own risk")
    warnings.warn(f"{unknown}, which {ANYWAY}=1 lets through: compare gradients", RuntimeWarning, stacklevel=2)


def _name(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


check(torch.__version__)
