"""Host memory before the drive: the oldest moves on when it is full, and nothing is lost on the way."""

import errno

import pytest
import torch
from engines import DelayedEngine, FailingEngine

from ssd_fx.runtime.engines import Memory, MemoryEngine, outcome
from ssd_fx.runtime.posix import PosixEngine
from ssd_fx.runtime.tiered import TieredEngine

N = 50_000
B = 4 * N


@pytest.fixture
def drive(tmp_path):
    engine = PosixEngine(str(tmp_path), allow_tmpfs=True)
    yield engine
    engine.close()


def tiered(drive, room=2 * B, in_flight=10 * B):
    host = MemoryEngine()
    return TieredEngine(host, drive, host.located, room, in_flight)


def put(engine, x):
    extent = engine.alloc(B)
    write = engine.write(extent, Memory.of(x))
    write.start()
    write.wait()
    return extent


def get(engine, extent):
    y = torch.empty(N)
    read = engine.read(extent, Memory.of(y))
    read.start()
    read.wait()
    return y


def settled(engine, extents):
    for extent in extents:
        if extent.moving:
            outcome(extent.moving)
    engine._reap()
    return "".join("h" if e.host else "d" for e in extents)


def test_the_oldest_moves_on(drive):
    engine = tiered(drive)
    xs = [torch.randn(N) for _ in range(5)]
    extents = [put(engine, x) for x in xs]
    assert settled(engine, extents) == "dddhh"
    assert (engine.host_bytes, engine.moving_bytes) == (2 * B, 0)
    assert all(torch.equal(get(engine, e), x) for e, x in zip(extents, xs, strict=True))
    for extent in extents:
        engine.free(extent)
    assert engine.host_bytes == 0


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


def test_while_too_much_moves_new_tensors_go_to_the_drive(drive):
    slow = DelayedEngine(drive, 60, 60)
    engine = tiered(slow, in_flight=B)
    extents = [put(engine, torch.randn(N)) for _ in range(3)]
    assert extents[0].moving
    late = engine.alloc(B)
    assert late.host is None
    assert engine.host_bytes == 3 * B


@pytest.mark.parametrize("operation", ["alloc", "submit", "write"])
def test_a_drive_that_fails_leaves_it_in_host_memory(drive, operation):
    failing = FailingEngine(drive, lambda op, count: op == operation, errno.EIO)
    engine = tiered(failing, room=B)
    xs = [torch.randn(N) for _ in range(2)]
    extents = [put(engine, xs[0])]
    if operation == "write":
        extents.append(put(engine, xs[1]))
    else:  # neither can the oldest move on, nor the new one go there
        with pytest.raises(OSError, match="planted"):
            put(engine, xs[1])
    settled(engine, extents)
    for extent, x in zip(extents, xs, strict=False):
        assert extent.host
        assert torch.equal(get(engine, extent), x)
    assert failing.refused == ([] if operation == "alloc" else [errno.EIO])
