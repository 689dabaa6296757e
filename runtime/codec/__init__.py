"""Codecs that compress stored tensors: opt-in, one per tier (`Config.compression`).

To add a codec, add a file to this folder that lists it in `CODECS`. Only the docstring of `ssd_fx.options.Options`
names the codecs elsewhere. A tensor stays as it is if a codec cannot make it smaller, or if a lossy codec finds
infinities or NaNs in it.
"""

from __future__ import annotations

import importlib
import pkgutil

import torch
from torch import Tensor

from ssd_fx.runtime.codec.base import Codec, Encoded, relative_error

__all__ = ["CODECS", "Encoded", "encode", "is_lossy", "relative_error", "shrinks"]


def found() -> dict[str, Codec]:
    """The codecs of the files of this folder, by name."""
    modules = [importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return {codec.name: codec for module in modules for codec in getattr(module, "CODECS", ())}


CODECS = found()


def encode(codec: str, x: Tensor) -> tuple[Tensor, Encoded] | None:
    """The payload (uint8, 1-d, on x's device) of a dense tensor, or None if `codec` does not encode it.

    Any thread may call it, without a lock.
    """
    return CODECS[codec].encode(x)


def is_lossy(codec: str, dtype: torch.dtype) -> bool:
    """Whether `codec` changes the values of tensors of `dtype`."""
    return codec in CODECS and dtype in CODECS[codec].lossy


def shrinks(codec: str) -> dict[torch.dtype, float]:
    """By dtype, the encoded size of a large tensor as a share of its bytes, where it does not depend on the values."""
    return dict(CODECS[codec].shares)
