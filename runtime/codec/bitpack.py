"""The lossless codec. Bools become bits, and integers take a narrower type that holds them all. Floats that are mostly
zero (ReLU) become a bit map and the values that are not zero.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ssd_fx.runtime.codec.base import FLOATS, Codec, Encoded, flatten
from ssd_fx.runtime.layout import TensorMeta, alias

PAYS = 0.75  # a sparse tensor must shrink to this share, because encoding it costs about as much as writing it
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHARES = {torch.bool: 1 / 8}


def encode(x: Tensor) -> tuple[Tensor, Encoded] | None:
    """As `Codec.encode`."""
    flat = flatten(x)
    if x.dtype is torch.bool:
        return pack_bits(flat), Encoded(-(-flat.numel() // 8), False, _decode_bits)
    if x.dtype in (torch.int64, torch.int32, torch.int16):
        return _narrow(flat)
    return _sparse(flat) if x.dtype in FLOATS else None


CODECS = (Codec("bitpack", encode, shares=SHARES),)


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
    """One byte for every 8 bools. Multiplying 8 bytes of 0 or 1 as one integer moves byte i to bit i of the top one."""
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
    """A bit map, and the values that are not zero. A negative zero is stored as a value: its bits are not all zero."""
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
