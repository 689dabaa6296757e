"""Codecs that compress stored tensors: opt-in, one per tier (`Config.compression`).

    bitpack   lossless. Bools become bits; integers take a narrower type that holds them all; floats that are mostly
              zero (ReLU) become a bit map and the values that are not zero.
    fp8       As bitpack, but floats of 2 or 4 bytes become float8_e4m3fn with a float32 scale per block of 128.
    int8      The same with int8.

A tensor stays as it is if a codec cannot make it smaller, or if a lossy codec finds infinities or NaNs in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd_fx.runtime.layout import TensorMeta, alias

BLOCK = 128
PAYS = 0.75  # a sparse tensor must shrink to this share, because encoding it costs about as much as writing it
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LOSSY: dict[str, tuple[torch.dtype, float]] = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
CODECS = ("bitpack", *_LOSSY)
_LARGEST = torch.finfo(torch.float32).max * (1 - torch.finfo(torch.float32).eps)
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Encoded:
    """How a tensor was encoded, in `nbytes`. `decode(payload, out)` fills `out`, which has its dense layout."""

    nbytes: int
    lossy: bool
    decode: Callable[[Tensor, Tensor], None]


def encode(codec: str, x: Tensor) -> tuple[Tensor, Encoded] | None:
    """The payload (uint8, 1-d, on x's device) of a dense tensor, or None if `codec` does not encode it.

    All codecs pack bools and narrow integers in the same lossless way. They differ in what they do to floats.
    """
    flat = flatten(x)
    if x.dtype is torch.bool:
        return pack_bits(flat), Encoded(-(-flat.numel() // 8), False, _decode_bits)
    if x.dtype in (torch.int64, torch.int32, torch.int16):
        return _narrow(flat)
    if x.dtype in _FLOATS and codec in _LOSSY:
        return _quantize(flat, *_LOSSY[codec])
    return _sparse(flat) if x.dtype in _FLOATS else None


def is_lossy(codec: str, dtype: torch.dtype) -> bool:
    """Whether `codec` changes the values of tensors of `dtype`."""
    return codec in _LOSSY and dtype in _FLOATS


def shrinks(codec: str) -> dict[torch.dtype, float]:
    """The share of its bytes that a large tensor is encoded in, by dtype, where that does not depend on the values."""
    shares = {torch.bool: 1 / 8}
    if codec in _LOSSY:
        shares |= {dtype: (1 + torch.float32.itemsize / BLOCK) / dtype.itemsize for dtype in _FLOATS}
    return shares


def relative_error(x: Tensor, decoded: Tensor) -> float:
    """The root mean square of the difference over that of `x`; 0 for a tensor of zeros."""
    exact = x.double()
    norm = float(exact.norm())
    return float((exact - decoded.double()).norm()) / norm if norm else 0.0


def flatten(x: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, as a view."""
    return alias(x, TensorMeta((x.numel(),), (1,), x.dtype))


def pack_bits(flat: Tensor) -> Tensor:
    """The bools as bytes of 8, the first in the lowest bit; the last byte is filled up with zeros."""
    whole = flat.numel() // 8 * 8
    packed = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
    packed[: whole // 8] = _gather(flat[:whole])
    if whole < flat.numel():
        last = torch.zeros(8, dtype=torch.bool, device=flat.device)
        last[: flat.numel() - whole] = flat[whole:]
        packed[whole // 8 :] = _gather(last)
    return packed


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bools of what `pack_bits` returned."""
    spread = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)
    return spread.bitwise_and_(1).view(-1)[:count].view(torch.bool)


def _gather(bools: Tensor) -> Tensor:
    """One byte for every 8 bools. Multiplying 8 bytes of 0 or 1 as one integer moves byte i to bit i of the highest."""
    bytes_ = bools.view(torch.uint8) != 0  # a bool that is a view of a byte may hold any value
    words = alias(bytes_, TensorMeta((bools.numel() // 8,), (1,), torch.int64))
    return (words * 0x0102040810204080 >> 56).to(torch.uint8)


def _decode_bits(payload: Tensor, out: Tensor) -> None:
    flatten(out).copy_(unpack_bits(payload, out.numel()))


def _narrow(flat: Tensor) -> tuple[Tensor, Encoded] | None:
    low, high = (int(v) for v in torch.aminmax(flat))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if dtype.itemsize < flat.itemsize and limits.min <= low and high <= limits.max:
            payload = flat.to(dtype).view(torch.uint8)
            return payload, Encoded(payload.numel(), False, functools.partial(_widen, dtype))
    return None


def _widen(dtype: torch.dtype, payload: Tensor, out: Tensor) -> None:
    flatten(out).copy_(payload.view(dtype))


def _sparse(flat: Tensor) -> tuple[Tensor, Encoded] | None:
    """Only elements whose bits are all zero count as zero; a negative zero is stored as a value."""
    bits = flat.view(_BITS_OF[flat.itemsize])
    nonzero = int(torch.count_nonzero(bits))
    map_bytes = -(-flat.numel() // 8)
    nbytes = map_bytes + nonzero * flat.itemsize
    if nbytes > PAYS * flat.numel() * flat.itemsize:
        return None
    mask = bits != 0
    payload = torch.cat([pack_bits(mask), bits[mask].view(torch.uint8)])

    def decode(payload: Tensor, out: Tensor) -> None:
        flat = flatten(out)
        bits = flat.view(_BITS_OF[flat.itemsize]).zero_()
        values = payload[map_bytes:].clone().view(bits.dtype)  # a copy: behind the map they are not aligned
        bits.masked_scatter_(unpack_bits(payload[:map_bytes], bits.numel()), values)

    return payload, Encoded(nbytes, False, decode)


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
