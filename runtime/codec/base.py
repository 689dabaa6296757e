"""What a codec is, and what codecs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd_fx.runtime.layout import TensorMeta, alias

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SLICE = 1 << 20  # elements that are looked at in double precision at a time


@dataclass(frozen=True, slots=True)
class Encoded:
    """How a tensor was encoded, into `nbytes`. `decode(payload, out)` fills `out`, a tensor of its dense layout."""

    nbytes: int
    lossy: bool
    decode: Callable[[Tensor, Tensor], None]


Encode = Callable[[Tensor], tuple[Tensor, Encoded] | None]


@dataclass(frozen=True, slots=True)
class Codec:
    """A codec by the `name` that the option `compression` gives it.

    `encode`: returns the payload (uint8, 1-d, on the device) of a dense tensor, or None if it does not encode it.
        Several threads may call it at a time, so it keeps nothing between calls, and only reads the tensor.
    `lossy`: the types whose values it changes.
    `shares`: by type, the encoded size of a large tensor as a share of its bytes, where the values do not matter.
    """

    name: str
    encode: Encode
    lossy: tuple[torch.dtype, ...] = ()
    shares: Mapping[torch.dtype, float] = field(default_factory=dict)


def relative_error(x: Tensor, decoded: Tensor) -> float:
    """The root mean square of the difference over that of `x`; 0 for a tensor of zeros. Both have one dense layout."""
    norms = []
    for part, found in zip(flatten(x).split(SLICE), flatten(decoded).split(SLICE), strict=True):
        exact = part.double()
        norms.append(torch.stack([exact.norm(), (exact - found.double()).norm()]))
    norm, lost = torch.stack(norms).norm(dim=0).tolist()
    return lost / norm if norm else 0.0


def flatten(x: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, as a view."""
    return alias(x, TensorMeta((x.numel(),), (1,), x.dtype))
