"""Bytes that changed on the disk are found, wherever they are: the file is changed behind the engine's back."""

import ctypes
import errno
import os
import random

import pytest
import torch

from ssd_fx.runtime.engines import posix
from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.native import loader
from ssd_fx.runtime.native.pool import BLOCK, CHECKSUM_MISMATCH, CUDA_FAILED, END_OF_FILE
from tests.runtime import native_parts
from tests.runtime.harness import CPU, config_json, load, move, raw, settle, store

KIB, MIB = 1 << 10, 1 << 20
SHORT = 20 * KIB  # the last block

# (bytes of the tensor, block to damage): in place in one piece, in place over three pieces, bounced
PLACES = [(3 * MIB + SHORT, block) for block in range(4)]
PLACES += [(1000, 0), (60 * KIB, 0)]
LONG = [(17 * MIB + SHORT, block) for block in (0, 7, 8, 16, 17)]
NOISE = random.Random(0).randbytes(18 * MIB)


@pytest.fixture
def engine(tmp_path):
    made = posix.PosixEngine(str(tmp_path), allow_tmpfs=True, step=MIB)
    yield made
    made.close()


class Aligned:
    """`nbytes` at `phase` modulo a page, filled with `data` or zeros."""

    def __init__(self, nbytes, data=b"", phase=0):
        self._keep = (ctypes.c_ubyte * (nbytes + 8192))()
        at = ctypes.addressof(self._keep)
        self.memory = Memory(at + (-at % 4096) + phase, nbytes, CPU)
        ctypes.memmove(self.memory.ptr, data, len(data))

    def bytes(self):
        return ctypes.string_at(self.memory.ptr, self.memory.nbytes)


def write(engine, data):
    source = Aligned(len(data), data, phase=0 if len(data) > MIB else 64)
    extent = engine.alloc(len(data))
    move(engine.write(extent, source.memory))
    return extent


class Behind:
    """The engine's file through a descriptor of its own, with the page cache, so that any offset goes."""

    def __init__(self, engine):
        self.fd = os.open(f"/proc/self/fd/{engine.drives.files[0].fd}", os.O_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)

    def get(self, at, nbytes):
        return os.pread(self.fd, nbytes, at)

    def put(self, at, data):
        assert os.pwrite(self.fd, data, at) == len(data)


def flipped(was, rng, **_):
    at = rng.randrange(len(was))
    return was[:at] + bytes([was[at] ^ 1 << rng.randrange(8)]) + was[at + 1 :]


def first_bit(was, **_):
    return bytes([was[0] ^ 1]) + was[1:]


def last_bit(was, **_):
    return was[:-1] + bytes([was[-1] ^ 128])


def zeroed(was, **_):
    return bytes(len(was))


def lost(was, old, **_):
    return old


CASES = [(*place, damage) for place in PLACES for damage in (flipped, first_bit, last_bit, zeroed, lost)]
CASES += [(*place, flipped) for place in LONG]


@pytest.mark.parametrize(("nbytes", "block", "damage"), CASES)
def test_damage_is_found_in_every_block(engine, nbytes, block, damage):
    rng = random.Random(nbytes + block)
    data, older = NOISE[:nbytes], NOISE[-nbytes:]
    extent = write(engine, data)
    inside = slice(block * BLOCK, min(nbytes, (block + 1) * BLOCK))
    with Behind(engine) as file:
        at = extent.offset + inside.start
        was = file.get(at, inside.stop - inside.start)
        assert was == data[inside]
        file.put(at, damage(was, rng=rng, old=older[inside]))
        expect_mismatch(engine, extent, at)
        file.put(at, was)
    target = Aligned(nbytes)
    move(engine.read(extent, target.memory))
    assert target.bytes() == data


def expect_mismatch(engine, extent, at):
    target = Aligned(extent.nbytes)  # alive for as long as a worker may write into it
    completion = engine.read(extent, target.memory)
    completion.start()
    with pytest.raises(OSError, match=f"checksum mismatch in the block at offset {at}:") as raised:
        completion.wait()
    assert raised.value.errno == errno.EIO
    assert raised.value.filename == extent.directory
    assert f"{extent.nbytes} B at offset {extent.offset} of" in str(raised.value)


def test_swapped_blocks(engine):
    """Each block is whole and was written by us, but they lie in each other's place."""
    data = random.Random(0).randbytes(3 * MIB)
    extent = write(engine, data)
    with Behind(engine) as file:
        file.put(extent.offset, data[2 * MIB :])
        file.put(extent.offset + 2 * MIB, data[:MIB])
        expect_mismatch(engine, extent, extent.offset)


def test_extents_in_each_others_place(engine):
    first, second = write(engine, b"a" * 5000), write(engine, b"b" * 5000)
    with Behind(engine) as file:
        a, b = file.get(first.offset, 8192), file.get(second.offset, 8192)
        file.put(first.offset, b)
        file.put(second.offset, a)
    expect_mismatch(engine, first, first.offset)
    expect_mismatch(engine, second, second.offset)


def test_read_into_another_phase_is_checked(engine):
    """The bytes come through a buffer; what does not agree is not copied out of it."""
    data = random.Random(0).randbytes(2 * MIB + SHORT)
    extent = write(engine, data)
    target = Aligned(len(data), phase=64)
    move(engine.read(extent, target.memory))
    assert target.bytes() == data
    with Behind(engine) as file:
        file.put(extent.offset + 2 * MIB + 77, b"x" if data[2 * MIB + 77 : 2 * MIB + 78] != b"x" else b"y")
    target = Aligned(len(data), phase=64)
    completion = engine.read(extent, target.memory)
    completion.start()
    with pytest.raises(OSError, match=f"checksum mismatch in the block at offset {extent.offset + 2 * MIB}:"):
        completion.wait()
    assert target.bytes() == bytes(len(data))


def test_every_byte_on_disk_is_summed_twice(engine):
    nbytes = 9 * MIB + SHORT
    extent = write(engine, bytes(nbytes))
    assert engine._pool.summed_bytes() == nbytes
    target = Aligned(nbytes)
    move(engine.read(extent, target.memory))
    assert engine._pool.summed_bytes() == 2 * nbytes
    assert len(extent.sums) == 10


def damaged(config):
    """A stored tensor, and the place of its first byte on disk changed."""
    x = torch.randint(0, 100, (3 * MIB,), dtype=torch.uint8)
    handle = store(x, config)
    entry = settle(handle)
    engine, extent = entry.store.engine, entry.extent
    with Behind(engine) as file:
        file.put(extent.offset, b"\xff" * 8)
    return x, handle, engine, extent


def test_store_tries_again_and_raises(tmp_path):
    x, handle, engine, extent = damaged(config_json(tmp_path))
    before = engine._pool.summed_bytes()
    with pytest.raises(OSError, match=r"slot 0 of graph 'g'.* failed 3 times: .*checksum mismatch") as raised:
        load(handle, x)
    assert raised.value.errno == errno.EIO
    assert engine._pool.summed_bytes() - before == 3 * extent.body_bytes


def test_off_is_off(tmp_path):
    """Nothing is summed, nothing is kept, and the wrong bytes come back: the price that the option names."""
    x, handle, engine, extent = damaged(config_json(tmp_path, checksums=False))
    y = load(handle, x)
    assert raw(y) == b"\xff" * 8 + raw(x)[8:]
    assert engine._pool.summed_bytes() == 0
    assert extent.sums is None


# ---- the function itself


def computed(hardware, data):
    crc, total = ctypes.c_uint32(), ctypes.c_uint64()
    if not native_parts.library().checksum_by(hardware, data, len(data), ctypes.byref(crc), ctypes.byref(total)):
        pytest.skip("this CPU has no CRC32C instruction")
    return crc.value, total.value


@pytest.mark.parametrize("hardware", [0, 1], ids=["portable", "hardware"])
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_known_values_of_crc32c(hardware, data, crc):
    """The check value of the catalogues, and those of RFC 3720, B.4."""
    assert computed(hardware, data)[0] == crc


def test_instruction_and_table_agree():
    rng = random.Random(0)
    for nbytes in [*range(70), *(rng.randrange(70, 5000) for _ in range(30)), BLOCK - 1, BLOCK]:
        data = rng.randbytes(nbytes)
        assert computed(0, data) == computed(1, data)


def test_sum_depends_on_every_bit():
    """Every single flip of a short block gives a sum of its own, and so do the lengths of a block of zeros."""
    data = bytearray(random.Random(0).randbytes(133))
    sums = {computed(0, bytes(data))[1]}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        sums.add(computed(0, bytes(data))[1])
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 8 * len(data) + 1
    assert len({computed(0, bytes(nbytes))[1] for nbytes in range(200)}) == 200


def test_the_constants_agree():
    assert native_parts.library().block_size() == BLOCK
    header = (loader.SOURCE.parent / "pool.h").read_text()
    for name, code in {
        "END_OF_FILE": END_OF_FILE,
        "CHECKSUM_MISMATCH": CHECKSUM_MISMATCH,
        "CUDA_FAILED": CUDA_FAILED,
    }.items():
        assert f"{name} = {code}" in header
