"""Every size, dtype, layout and address comes back bit for bit, from disk and from memory."""

import mmap
import os

import pytest
import torch

from ssd_fx.runtime.engines.base import Memory
from ssd_fx.runtime.states import State
from ssd_fx.runtime.stores import get_store
from tests.runtime.engines import DelayedEngine, around
from tests.runtime.harness import CPU, begin, config_json, load, move, op, put, raw, release, settle, store, watch

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 3, 511, 512, 513, 4095, 4096, 4097, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB + 4, 8 * MIB, 40 * MIB]


def noise(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def at_phase(base, phase, nbytes):
    """`nbytes` of `base` at an address that is `phase` modulo a page."""
    start = (phase - base.data_ptr()) % 4096
    return base[start : start + nbytes]


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_from_disk(any_config, nbytes):
    x = noise(nbytes)
    expected = x.clone()
    h = store(x, any_config)
    settle(h)
    release(h, x)
    x.data.zero_()  # the memory is ours no more, and whatever is in it must not matter
    assert torch.equal(load(h, expected), expected)


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes_forwarded(any_config, nbytes):
    expected = noise(nbytes)
    h = put(expected.clone(), any_config)
    assert torch.equal(load(h, expected), expected)


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "uint8",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
    ],
)
def test_dtypes(config, dtype):
    dtype = getattr(torch, dtype)
    x = noise(dtype.itemsize * 70_001).view(torch.uint8)
    x = (x & 1).view(dtype) if dtype is torch.bool else x.view(dtype)
    expected = raw(x)
    h = store(x, config)
    settle(h)
    y = load(h, x)
    assert y.dtype is dtype
    assert raw(y) == expected


@pytest.mark.parametrize("size", [(3, 5, 7), (64, 33, 17), (1, 300, 1, 100)])
@pytest.mark.parametrize("order", ["transposed", "rotated", "channels_last"])
def test_dense_layouts(any_config, size, order):
    x = torch.randn(size)
    x = {"transposed": x.mT, "rotated": x.permute(*range(1, x.ndim), 0), "channels_last": x}[order]
    if order == "channels_last" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    h = store(x, any_config)
    settle(h)
    y = load(h, x, consume=False)
    assert y.stride() == x.stride()
    assert torch.equal(y, x)


@pytest.mark.parametrize("from_disk", [True, False])
@pytest.mark.parametrize(("rows", "stride"), [(7, (1, 7)), (700, (1, 700)), (50, (304, 1))])
def test_asked_strides_differ_from_stored_ones(config, from_disk, rows, stride):
    """Turned, or with gaps."""
    x = torch.randn(rows, 300)
    h = store(x, config)
    if from_disk:
        settle(h)
    y = op.load(h, [rows, 300], stride, torch.float32, CPU, 0)
    op.wait_load_(y, h, 1)
    assert y.stride() == stride
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    ("size", "stride", "dtype"),
    [
        ([99, 300], [300, 1], torch.float32),
        ([30_000], [1], torch.float32),
        ([60_000], [1], torch.bfloat16),
        ([100, 300], [300, 1], torch.int32),
        ([300, 100], [1, 300], torch.float32),
    ],
)
def test_other_bytes_are_refused(config, size, stride, dtype):
    x = torch.randn(100, 300)
    h = store(x, config, slot=4)
    with pytest.raises(RuntimeError, match=r"slot 4 of graph 'g'.*(a load asks for size|compiled for torch\.)"):
        op.load(h, size, stride, dtype, CPU, 0)


@pytest.mark.parametrize("phase", [0, 1, 8, 64, 448, 511, 512, 513, 4032, 4095])
@pytest.mark.parametrize("nbytes", [100, 70_000, 65_536 + 512, MIB])
def test_phases(config, phase, nbytes):
    x = at_phase(noise(nbytes + 8192), phase, nbytes)
    assert x.data_ptr() % 4096 == phase
    h = store(x, config)
    settle(h)
    y = load(h, x)
    assert raw(y) == raw(x)


@pytest.mark.parametrize("written_at", [0, 64])
def test_a_read_fills_its_tensor_and_nothing_else(config, written_at):
    x = at_phase(noise(2 * MIB), written_at, MIB + 100)
    h = store(x, config)
    entry = settle(h)
    for phase in (0, 1, 65, 4000):
        base = noise(2 * MIB)
        before = base.clone()
        y = at_phase(base, phase, x.numel())
        start = y.storage_offset()
        read = entry.store.engine.read(entry.extent, Memory.of(y))
        move(read)
        assert torch.equal(y, x)
        assert torch.equal(base[:start], before[:start])
        assert torch.equal(base[start + x.numel() :], before[start + x.numel() :])


@pytest.mark.parametrize("phase", [0, 64])
@pytest.mark.parametrize("nbytes", [10, 5000, 70_000, MIB + 77])
def test_bytes_are_on_the_disk(config, nbytes, phase):
    """An independent read of the file finds all but a tail that is shorter than the alignment."""
    x = at_phase(noise(nbytes + 8192), phase, nbytes)
    h = store(x, config)
    extent, file = settle(h).extent, get_store(config).engine.drives.files[0]
    align = file.align
    body = raw(x)[: extent.body_bytes]
    assert body + extent.tail == raw(x)
    assert len(extent.tail) == (nbytes % align if phase % align == 0 and nbytes >= align else 0)
    buffer = mmap.mmap(-1, -(-nbytes // 4096) * 4096)
    os.preadv(file.fd, [buffer], extent.offset)
    assert buffer[: len(body)] == body
    buffer.close()


def test_padding_on_disk_is_zero(config):
    """What is recycled memory here was another tensor's: its bytes do not go to the disk with a tiny one."""
    for value in (255, 1):
        x = torch.full((5,), value, dtype=torch.uint8)
        h = store(x, config)
        extent, file = settle(h).extent, get_store(config).engine.drives.files[0]
        buffer = mmap.mmap(-1, 4096)
        os.preadv(file.fd, [buffer], extent.offset)
        assert buffer[5 : file.align].count(0) == file.align - 5
        buffer.close()
        dirty = noise(4000)
        settle(store(dirty, config))


def test_zero_bytes(any_config):
    x = torch.empty(0, 7)
    h = store(x, any_config)
    release(h, x, hand_over=False)
    y = load(h, x)
    assert y.shape == (0, 7)
    assert settle(h).extent is None
    assert settle(h).state is State.EMPTY


def test_scalar(config):
    x = torch.tensor(3.5)
    h = store(x, config)
    settle(h)
    assert load(h, x).item() == 3.5


def test_buffered_where_direct_is_refused(tmp_path, monkeypatch):
    """Without O_DIRECT everything works, after one warning."""
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match="takes no direct I/O"):
        begin(config_json(tmp_path), offloaded=1)
    monkeypatch.undo()
    for nbytes in (1, 70_001, MIB):
        x = noise(nbytes)
        h = store(x, config_json(tmp_path))
        extent, file = settle(h).extent, get_store(config_json(tmp_path)).engine.drives.files[0]
        assert file.align == 1
        assert os.pread(file.fd, nbytes, extent.offset) == raw(x)
        assert torch.equal(load(h, x), x)


def test_requires_grad_and_inference_mode(config):
    x = torch.randn(40_000, requires_grad=True)
    h = store(x, config)
    settle(h)
    assert torch.equal(load(h, x, consume=False), x)
    with torch.inference_mode():
        x = torch.randn(40_000)
        h = store(x, config)
        release(h, x, hand_over=False)
        assert torch.equal(load(h, x, consume=False), x)


@pytest.mark.parametrize("source", ["read", "given", "copied"])
@pytest.mark.parametrize("relies_on", ["", "strides", "address"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :1].expand(60, 50),
        lambda x: x[:, ::2],
        lambda x: x[3:, 7:9].t(),
        lambda x: x.view(-1).unfold(0, 50, 20),
    ],
    ids=["expanded", "steps", "slice", "windows"],
)
def test_gaps_and_overlaps(tmp_path, view, relies_on, source):
    """An operator returned what its metadata did not promise: the range that it spans is stored."""
    base = torch.randn(60, 50)
    x = view(base)
    expected = x.clone()
    engine = around(lambda inner: DelayedEngine(inner, 30, 40) if source != "read" else inner)
    h = store(x, config_json(tmp_path, engine))
    release(h, x)
    if source == "read":
        settle(h)
    strides = x.stride()
    del x, base
    asked = torch.empty(expected.shape)
    y = load(h, asked, consume=source == "given", relies_on=relies_on)
    assert torch.equal(y, expected)
    assert y.stride() == (asked.stride() if relies_on else strides)
    assert y.storage_offset() == 0 or relies_on == "address"


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, ::2], lambda x: x[:, :1].expand(60, 50)])
def test_memory_goes_once_it_is_written(config, view):
    base = torch.randn(60, 50)
    x, alive = view(base), watch(base)
    h = store(x, config)
    release(h, x)
    del x, base
    settle(h)
    begin(config)  # any op sees that the write is done
    release_nothing = store(torch.randn(3), config, slot=1)
    assert alive.expired()
    del h, release_nothing
