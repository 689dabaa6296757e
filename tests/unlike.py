"""What other versions of torch do otherwise than the one that the tests are written for, 2.13."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def before(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Marks a test that need not pass before that torch, where `what` is so; `make matrix` counts it as skipped."""
    return _expected(version > TORCH, f"before torch {version[0]}.{version[1]} {what}")


def since(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Marks a test that need not pass from that torch on."""
    return _expected(version <= TORCH, f"since torch {version[0]}.{version[1]} {what}")


def _expected(fails: bool, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(fails, reason=reason, strict=False)


DYNAMIC_STAYS = before((2, 13), "tensors of dynamic shape stay, for the backward does not get their sizes")
OTHER_BACKWARD = before((2, 13), "the backward of a selection calls zeros where it now calls new_zeros")
OTHER_NAMES = since((2, 14), "the nodes of this graph have other numbers in their names")
