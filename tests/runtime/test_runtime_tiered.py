"""Host memory before the drive: the oldest moves on when it is full, and nothing is lost on the way."""

import errno
import json

import pytest
import torch

from ssd_fx.runtime import stats
from ssd_fx.runtime.device import streams
from ssd_fx.runtime.engines.base import Memory, outcome
from ssd_fx.runtime.engines.extents import disk_bytes
from ssd_fx.runtime.engines.memory import MemoryEngine
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.engines.tiered import TieredEngine
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.stores import close_stores
from tests.runtime.engines import DelayedEngine, FailingEngine, LateWrite, Wrapped, around
from tests.runtime.fake_gpu import ORDERS, installed
from tests.runtime.harness import config_json, load, move, op, raw, release, settle

N = 50_000
B = 4 * N


@pytest.fixture
def drive(tmp_path):
    engine = PosixEngine(str(tmp_path), allow_tmpfs=True)
    yield engine
    engine.close()


def tiered(drive, room=2 * B, in_flight=10 * B, moved=lambda nbytes: None):
    return TieredEngine(MemoryEngine(), drive, room, in_flight, moved)


def put(engine, x):
    extent = engine.alloc(x.nbytes)
    move(engine.write(extent, Memory.of(x)))
    return extent


def get(engine, extent):
    y = torch.empty(N)
    move(engine.read(extent, Memory.of(y)))
    return y


def settled(engine, extents):
    for extent in extents:
        if extent.moving:
            outcome(extent.moving)
    engine._reap()
    return "".join("h" if e.host else "d" for e in extents)


def test_the_oldest_moves_on(drive):
    """And each that does wears the drive once."""
    moved = []
    engine = tiered(drive, moved=moved.append)
    xs = [torch.randn(N) for _ in range(5)]
    extents = [put(engine, x) for x in xs]
    assert settled(engine, extents) == "dddhh"
    assert (engine.host_bytes, engine.moving_bytes) == (2 * B, 0)
    assert [extent.on_drive for extent in extents] == [True, True, True, False, False]
    assert moved == [B, B, B]
    assert all(torch.equal(get(engine, e), x) for e, x in zip(extents, xs, strict=True))
    for extent in extents:
        engine.free(extent)
    assert engine.host_bytes == 0


@pytest.mark.parametrize(("code", "refused"), [(errno.EIO, [errno.EIO]), (errno.ENOMEM, [])])
def test_a_move_that_fails_stays_in_host_memory(drive, code, refused):
    """Only the drive's own errors retire the drive: the next tensor may find memory for its bounce."""
    failing = FailingEngine(drive, lambda op, count: op == "write" and count == 0, code)
    moved = []
    engine = tiered(failing, room=B, moved=moved.append)
    xs = [torch.randn(N) for _ in range(2)]
    extents = [put(engine, x) for x in xs]
    assert settled(engine, extents) == "hh"
    assert (failing.refused, moved) == (refused, [])
    assert all(torch.equal(get(engine, e), x) for e, x in zip(extents, xs, strict=True))


class FullAtFirst(Wrapped):
    """A drive without room for the first tensor."""

    full = True

    def alloc(self, nbytes, tier=""):
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, "full")
        return super().alloc(nbytes, tier)


def no_memory_at_first(drive):
    return FailingEngine(drive, lambda op, count: op == "write" and count == 0, errno.ENOMEM)


@pytest.mark.parametrize("wrap", [FullAtFirst, no_memory_at_first])
def test_a_move_that_failed_is_tried_again(drive, wrap):
    """Else the tensor would take its part of host memory until its backward, though the drive has room meanwhile."""
    engine = tiered(wrap(drive), room=B)
    xs = [torch.randn(N) for _ in range(3)]
    extents = []
    for x in xs:
        extents.append(put(engine, x))
        settled(engine, extents)
    assert settled(engine, extents) == "ddh"
    assert all(torch.equal(get(engine, e), x) for e, x in zip(extents, xs, strict=True))


def test_a_move_that_failed_retires_the_drive_even_if_nobody_wants_the_bytes(drive):
    failing = FailingEngine(drive, lambda op, count: op == "write")
    engine = tiered(failing, room=B)
    extents = [put(engine, torch.randn(N)) for _ in range(2)]
    engine.free(extents[0])
    assert (failing.refused, engine.moving_bytes, engine.host_bytes) == ([errno.EIO], 0, B)


def test_what_is_wanted_stops_moving(drive):
    """Its write to the drive is cancelled; it is read from host memory."""
    slow = DelayedEngine(drive, 60, 60)
    engine = tiered(slow)
    xs = [torch.randn(N) for _ in range(3)]
    extents = [put(engine, x) for x in xs]
    assert extents[0].moving
    assert torch.equal(get(engine, extents[0]), xs[0])
    assert (extents[0].moving, engine.moving_bytes, engine.host_bytes) == (None, 0, 3 * B)


def test_death_while_moving(drive):
    slow = DelayedEngine(drive, 60, 60)
    engine = tiered(slow)
    extents = [put(engine, torch.randn(N)) for _ in range(3)]
    for extent in extents:
        engine.free(extent)
    assert (engine.moving_bytes, engine.host_bytes) == (0, 0)


def test_death_while_the_engine_closes(drive, monkeypatch):
    """Closing waits without the lock for what moves, so that is when another thread frees it."""
    engine = tiered(DelayedEngine(drive, 60, 60), room=B)
    first, _ = put(engine, torch.randn(N)), put(engine, torch.randn(N))
    cancel = LateWrite.cancel

    def dies_meanwhile(write):
        monkeypatch.setattr(LateWrite, "cancel", cancel)
        engine.free(first)
        return write.cancel()

    monkeypatch.setattr(LateWrite, "cancel", dies_meanwhile)
    engine.close()
    assert (engine.moving_bytes, engine.host_bytes) == (0, B)


def test_a_large_tensor_does_not_move_for_small_ones_while_others_move(drive):
    """Host memory holds what has its place there, and `in_flight` bytes that move."""
    slow = DelayedEngine(drive, 60, 60)
    engine = tiered(slow, room=4 * B, in_flight=2 * B)
    for numbers in (N, 3 * N, N):
        put(engine, torch.randn(numbers))
    late = engine.alloc(B)
    assert late.host is None
    assert (engine.host_bytes, engine.moving_bytes) == (5 * B, B)


def test_while_too_much_moves_new_tensors_go_to_the_drive(drive):
    slow = DelayedEngine(drive, 60, 60)
    engine = tiered(slow, in_flight=B)
    extents = [put(engine, torch.randn(N)) for _ in range(3)]
    assert extents[0].moving
    late = engine.alloc(B)
    assert late.host is None
    assert engine.host_bytes == 3 * B


def test_what_is_larger_than_the_tier_moves_nothing_on(drive):
    engine = tiered(drive)
    extents, _ = put_in(engine, ["host", "host"])
    late = engine.alloc(3 * B, "host")
    assert (late.host, settled(engine, extents)) == (None, "hh")


@pytest.mark.parametrize("operation", ["alloc", "submit"])
def test_a_drive_that_fails_leaves_it_in_host_memory(drive, operation):
    """Neither can the oldest move on, nor the new one go there."""
    failing = FailingEngine(drive, lambda op, count: op == operation, errno.EIO)
    engine, x = tiered(failing, room=B), torch.randn(N)
    extent = put(engine, x)
    with pytest.raises(OSError, match="planted"):
        put(engine, torch.randn(N))
    assert settled(engine, [extent]) == "h"
    assert torch.equal(get(engine, extent), x)
    assert failing.refused == ([] if operation == "alloc" else [errno.EIO])


def test_a_move_that_failed_gives_its_room_back(drive):
    engine = tiered(FailingEngine(drive, lambda op, count: op == "write", errno.EIO), room=B)
    extents = [put(engine, torch.randn(N)) for _ in range(2)]
    assert settled(engine, extents) == "hh"
    before = disk_bytes()
    assert drive.alloc(before).offset == 0  # all of the file is free
    assert disk_bytes() == before > 0


def put_in(engine, tiers):
    """Tensors stored one after the other, each when the one before is written: their extents and values."""
    xs = [torch.randn(N) for _ in tiers]
    extents = []
    for x, tier in zip(xs, tiers, strict=True):
        extents.append(engine.alloc(B, tier))
        move(engine.write(extents[-1], Memory.of(x)))
    return extents, xs


@pytest.mark.parametrize(
    ("tiers", "where"),
    [
        (("ssd", "ssd"), "dd"),  # at once, though there is room
        (("host", "ssd", "host", "ssd"), "hdhd"),
        (("host", "host", "host"), "dhh"),  # more than the plan of one graph: the oldest moves on
        (("host", "", "host"), "hdh"),  # what is planned for it stays, the other moves
        (("host", "host", ""), "hhd"),
        (("", "", "host", ""), "ddhh"),
        (("", "", "ssd"), "hhd"),  # it takes no room that others would have to make
    ],
    ids=[
        "drive",
        "both",
        "too much",
        "unplanned moves",
        "unplanned finds no room",
        "unplanned among themselves",
        "none moves",
    ],
)
def test_the_plan_is_obeyed(drive, tiers, where):
    engine = tiered(drive)
    extents, xs = put_in(engine, tiers)
    assert settled(engine, extents) == where
    assert (engine.host_bytes, engine.moving_bytes) == (where.count("h") * B, 0)
    assert all(torch.equal(get(engine, e), x) for e, x in zip(extents, xs, strict=True))


@pytest.fixture
def gpu_config(monkeypatch, tmp_path):
    """As on a machine with a GPU, whose tensors are on the CPU: host memory is a tier, to which they are copied."""
    monkeypatch.setattr(streams, "accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    return config_json(tmp_path, host_budget=2 * B)


@pytest.mark.parametrize("tier", ["host", "ssd"])
def test_the_op_takes_the_tier(gpu_config, tier):
    x = torch.randn(N)
    handle = op.store(x, gpu_config, "g", 0, 0, tier)
    entry = settle(handle)
    release(handle, x)
    assert (entry.extent.host is not None, entry.extent.drive is not None) == (tier == "host", tier == "ssd")
    assert torch.equal(load(handle, x, consume=False), x)


@pytest.mark.parametrize(("tier", "encoded"), [("host", True), ("ssd", False)])
def test_each_tier_has_its_codec(gpu_config, tier, encoded):
    config = json.dumps({**json.loads(gpu_config), "compression": {"host": "bitpack"}})
    x = torch.arange(N, dtype=torch.int64) % 7
    handle = op.store(x, config, "g", 0, 0, tier)
    entry = settle(handle)
    assert (entry.encoded is not None) == encoded
    release(handle, x)
    assert torch.equal(load(handle, x, consume=False), x)


def test_what_finds_no_room_has_the_codec_of_its_tier(gpu_config):
    """A lossy codec gives the same values however full host memory is: the plan says which codec, not the place."""
    x, values = torch.randn(N), []
    for room, fits in ((10 * N, True), (N // 2, False)):
        changes = {"host_budget": room, "compression": {"host": "fp8", "ssd": "bitpack"}}
        handle = op.store(x, json.dumps(json.loads(gpu_config) | changes), "g", 0, 0, "host")
        entry = settle(handle)
        assert (entry.extent.host is not None) == fits
        release(handle, x)
        values.append(load(handle, x, consume=False))
    assert torch.equal(*values)
    assert not torch.equal(values[0], x)


def test_the_drive_is_told_of_a_write_that_failed(gpu_config):
    """Behind the tier, too: it takes no new tensors then."""
    engine = around(lambda inner: FailingEngine(inner, lambda operation, count: operation == "write"))
    config = json.dumps(json.loads(gpu_config) | {"engine": engine})
    x = torch.randn(N)
    handle = op.store(x, config, "g", 0, 0, "ssd")
    release(handle, x)
    assert torch.equal(load(handle, x, consume=False), x)
    drive = lookup(handle).store.engine._drive
    assert drive.refused == [errno.EIO]


def test_what_was_never_written_does_not_keep_others_from_moving_on(drive):
    """A Ctrl-C came between its room and its write: it stays, and the others move."""
    engine = tiered(drive, room=2 * B)
    engine.alloc(B)
    first, second = put(engine, torch.randn(N)), put(engine, torch.randn(N))
    assert settled(engine, [first, second]) == "dh"


def test_a_tier_that_is_none(gpu_config):
    with pytest.raises(ValueError, match=r"store of slot 3 of graph 'g' names tier 'disk'; right would be one of"):
        op.store(torch.randn(N), gpu_config, "g", 3, 0, "disk")


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_that_executes_late(gpu_config, order):
    """What is planned for host memory is copied there by the device, and comes back whole when its memory has gone."""
    values = torch.arange(N, dtype=torch.float32)
    with installed(order) as gpu:
        x = gpu.tensor(values)
        handle = op.store(x, gpu_config, "g", 0, 0, "host")
        release(handle, x)
        like = torch.empty(N)
        del x
        entry = settle(handle)
        entry.store.writer.reap()
        assert entry.extent.host
        assert entry.held is None
        gpu.scrub()
        y = load(handle, like, consume=False)
        assert gpu.bytes_of(y) == raw(values)
        del y, handle
        close_stores()


@pytest.mark.parametrize("order", ORDERS)
def test_no_tensor_moves_on_to_memory_that_a_copy_in_vain_still_fills(order):
    """Where the drive is host memory too (engine "memory"). The copy was given up, and the device does it all the same.

    A tensor that moves on is copied by the host, behind nothing that the device has yet to do.
    """

    def wrap(inner):
        return TieredEngine(MemoryEngine(), inner, B, B)

    values = [torch.arange(i, N + i, dtype=torch.float32) for i in range(3)]
    with installed(order) as gpu:
        config = json.dumps({"engine": around(wrap, "memory"), "adapt": False, "prefetch": 0})

        def put(slot, tier):
            x = gpu.tensor(values[slot])
            handle = op.store(x, config, "g", slot, 0, tier)
            release(handle, x)
            return handle

        first = put(0, "host")
        settle(first)
        given_away = put(1, "ssd")
        load(given_away, values[1])
        del given_away
        last = put(2, "host")  # so the first moves on
        assert lookup(first).extent.moving or lookup(first).extent.drive
        gpu.finish()
        right = [gpu.bytes_of(load(handle, values[i])) == raw(values[i]) for handle, i in ((first, 0), (last, 2))]
        assert right == [True, True]
        close_stores()


class NoMemory(MemoryEngine):
    def write(self, extent, memory):
        raise OSError(errno.ENOMEM, "no pinned memory")


def test_what_finds_no_host_memory_goes_to_the_drive(drive):
    engine = TieredEngine(NoMemory(), drive, 10 * B, 10 * B)
    x = torch.randn(N)
    extent = put(engine, x)
    assert (extent.on_drive, extent.drive.directory, engine.host_bytes) == (True, drive.alloc(1).directory, 0)
    assert torch.equal(get(engine, extent), x)
    engine.free(extent)


def test_such_a_tensor_counts_as_written_to_the_drive(tmp_path):
    engine = around(lambda drive: TieredEngine(NoMemory(), drive, 10 * B, 10 * B))
    stats.reset_stats()
    config = config_json(tmp_path, engine)
    x = torch.randn(N)
    handle = op.store(x, config, "full", 0, 0)
    release(handle, x)
    settle(handle)
    op.store(torch.ones(1), config, "full", 1, 2)
    assert stats.stats().graphs["full"].drive_bytes == B
    assert raw(load(handle, x)) == raw(x)
