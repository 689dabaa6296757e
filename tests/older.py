"""What older versions of torch do otherwise than the one that the tests are written for."""

from __future__ import annotations

import pytest
import torch

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def unlike_older(what: str) -> pytest.MarkDecorator:
    """Marks a test that need not pass before torch 2.13, where `what` is so; `make matrix` counts it as skipped."""
    return pytest.mark.xfail(OLDER, reason=f"before torch 2.13 {what}", strict=False)


DYNAMIC_STAYS = unlike_older("tensors of dynamic shape stay, for the backward does not get their sizes")
OTHER_BACKWARD = unlike_older("the backward of a selection calls zeros where it now calls new_zeros")
