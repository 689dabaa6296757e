"""The lossy codecs: floats of 2 or 4 bytes become float8_e4m3fn or int8, with a float32 scale per block of 128.

Tensors of other types are encoded as by `bitpack`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ssd_fx.runtime.codec import bitpack
from ssd_fx.runtime.codec.base import FLOATS, Codec, Encoded, flatten

BLOCK = 128
_LARGEST = torch.finfo(torch.float32).max * (1 - torch.finfo(torch.float32).eps)


def _encode(dtype: torch.dtype, largest: float, x: Tensor) -> tuple[Tensor, Encoded] | None:
    """As `Codec.encode`. `largest`: the largest number of `dtype`."""
    return _quantize(flatten(x), dtype, largest) if x.dtype in FLOATS else bitpack.encode(x)


_SHARES = bitpack.SHARES | {dtype: (1 + torch.float32.itemsize / BLOCK) / dtype.itemsize for dtype in FLOATS}
_NUMBERS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
CODECS = tuple(Codec(name, functools.partial(_encode, *which), FLOATS, _SHARES) for name, which in _NUMBERS.items())


def _quantize(flat: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Encoded] | None:
    """Scales each block so that its largest magnitude becomes the largest number of `dtype`."""
    count = flat.numel()
    blocks = -(-count // BLOCK)
    padded = torch.zeros(blocks * BLOCK, dtype=torch.float32, device=flat.device)
    padded[:count] = flat
    padded = padded.view(blocks, BLOCK)
    scales = padded.abs().amax(1, keepdim=True) / largest
    if not bool(scales.isfinite().all()):
        return None
    scales.clamp_(max=_LARGEST / largest)  # a scale is rounded: the largest number times it may be an infinity
    scales[scales == 0] = 1.0
    padded /= scales
    padded.clamp_(-largest, largest)  # a denormal scale is coarse: a quotient may be too large, and int8 would wrap
    if dtype is torch.int8:
        padded.round_()
    payload = torch.cat([scales.view(-1).view(torch.uint8), padded.to(dtype).view(-1).view(torch.uint8)])

    def decode(payload: Tensor, out: Tensor) -> None:
        scales = payload[: 4 * blocks].view(torch.float32).view(blocks, 1)
        numbers = payload[4 * blocks :].view(dtype).view(blocks, BLOCK)
        values = numbers.float().mul_(scales)
        flatten(out).copy_(values.view(-1)[:count])

    return payload, Encoded(payload.numel(), True, decode)
