"""The files of the directories: no extent overlaps another, no file grows without need, no allocation is slow."""

import errno
import fcntl
import itertools
import os
import random
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.runtime.engines.extents import BackingFile, beyond_the_reserve
from ssd_fx.runtime.memory.free_extents import FreeExtents
from ssd_fx.runtime.native import loader
from tests.runtime.harness import in_a_child

KIB, MIB = 1 << 10, 1 << 20
LAYER = [6, 6, 18, 6, 24, 24, 6]  # of a GPT block, in units of its own


def free_in(allocator):
    """(offset, length) of the free extents, the lowest first."""
    return sorted(allocator._lengths.items())


def check(allocator, live):
    """Live and free extents tile the range, and free ones never touch."""
    free = free_in(allocator)
    pieces = sorted([*free, *live.items()])
    at = 0
    for offset, length in pieces:
        assert offset == at
        at += length
    assert at == allocator.end
    assert all(offset + length < behind for (offset, length), (behind, _) in itertools.pairwise(free))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=120))
def test_extents_never_overlap(script):
    """Random allocations and frees: live and free extents tile the file; all freed, it is one piece."""
    allocator, live = FreeExtents(), {}
    for size, victim in script:
        if victim < len(live):
            offset = sorted(live)[victim]
            allocator.free(offset, live.pop(offset))
        else:
            offset = allocator.allocate(size)
            if offset is None:
                assert all(length < size for _, length in free_in(allocator))
                allocator.grow(size - allocator.tail_bytes())
                offset = allocator.allocate(size)
                assert offset + size == allocator.end
            live[offset] = size
        check(allocator, live)
    for offset, size in live.items():
        allocator.free(offset, size)
    assert free_in(allocator) == ([(0, allocator.end)] if allocator.end else [])


def test_best_fit_takes_the_smallest_hole_and_the_lowest_of_equals():
    allocator = FreeExtents(42)
    taken = [allocator.allocate(size) for size in (10, 1, 5, 1, 5, 1, 5, 14)]
    assert taken == [0, 10, 11, 16, 17, 22, 23, 28]
    for i in (0, 6, 4, 2):
        allocator.free(taken[i], (10, 1, 5, 1, 5, 1, 5, 14)[i])
    assert [allocator.allocate(size) for size in (4, 5, 5, 5)] == [11, 17, 23, 0]
    assert free_in(allocator) == [(5, 5), (15, 1)]


def test_growing_uses_the_free_tail():
    allocator = FreeExtents(10)
    assert allocator.allocate(4) == 0
    assert allocator.allocate(8) is None
    assert allocator.tail_bytes() == 6
    allocator.grow(2)
    assert allocator.allocate(8) == 4
    assert allocator.tail_bytes() == 0


def test_the_index_has_what_is_free():
    """Two neighbours freed and taken as one, over and over, and a rest of another length every time."""
    allocator = FreeExtents(30)
    assert [allocator.allocate(10) for _ in range(3)] == [0, 10, 20]
    for _ in range(100):
        allocator.free(0, 10)
        allocator.free(10, 10)
        assert allocator.allocate(20) == 0
    allocator.grow(1000)
    for _ in range(400):
        allocator.allocate(2)
    ((offset, length),) = free_in(allocator)
    assert (allocator._bins, allocator._sizes) == ({length: [offset]}, [length])
    assert allocator._ends == {offset + length: offset}


class Interruption(BaseException):
    pass


def interrupted(call, after):
    """Runs `call` and raises after that many of the bytecodes of the allocator; whether it came to an end."""
    left = after

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename.endswith("free_extents.py"):
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left < 0:
                    raise Interruption
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interruption:
        return False
    finally:
        sys.settrace(None)
    return True


@pytest.mark.parametrize("operation", ["allocate", "free", "grow"])
def test_ctrl_c_anywhere_never_hands_out_bytes_twice(operation):
    """An exception at each bytecode in turn: extents may be lost, but the allocator works on and none overlap."""
    for after in range(10_000):
        allocator = FreeExtents(100)
        live = {allocator.allocate(10): 10 for _ in range(8)}
        for offset in (10, 30, 50):
            allocator.free(offset, live.pop(offset))
        calls = {
            "allocate": lambda allocator=allocator: allocator.allocate(7),
            "free": lambda allocator=allocator: allocator.free(20, 10),
            "grow": lambda allocator=allocator: allocator.grow(5),
        }
        if operation == "free":
            del live[20]  # whoever frees it has forgotten it before
        ended = interrupted(calls[operation], after)
        for size in (3, 10, 10, 4, 25, 1, 1, 1, 7, 30):
            offset = allocator.allocate(size)
            if offset is None:
                allocator.grow(size)
                offset = allocator.allocate(size)
            assert offset is not None
            assert all(offset + size <= other or other + length <= offset for other, length in live.items())
            assert offset + size <= allocator.end
            live[offset] = size
        for offset, size in live.items():
            allocator.free(offset, size)
        free = free_in(allocator)
        assert all(offset + length < behind for (offset, length), (behind, _) in itertools.pairwise(free))
        if ended:
            break
    assert ended
    assert after > 20


def steps(seed, count, order, alive):
    """("allocate" | "free", extent, bytes) of `count` steps of three graphs of 2 to 12 layers with shapes that change
    in every step. Up to `alive` steps are under way; each dies layer by layer in `order`, with others in between."""
    rng, number, under_way = random.Random(seed), 0, []
    layers = [2, 5, 12]
    for _ in range(count):
        shape, step = rng.uniform(0.1, 1.0), []
        for _ in range(rng.choice(layers)):
            for size in LAYER:
                nbytes = int(size * 64 * KIB * shape) + rng.choice([0, 1, 100, 5000])
                yield "allocate", number, nbytes
                step.append((number, nbytes))
                number += 1
        under_way.append(step)
        while len(under_way) > alive:
            dying = under_way[rng.randrange(len(under_way))]
            for _ in range(rng.randrange(1, len(dying) + 1)):
                at = {"lifo": -1, "fifo": 0, "random": rng.randrange(len(dying))}[order]
                yield "free", *dying.pop(at)
            under_way = [step for step in under_way if step]
    for step in under_way:
        for number, nbytes in step:
            yield "free", number, nbytes


def used_over_live(events):
    """How far the range grew over the peak of the live bytes in it; afterwards it is one free piece."""
    allocator, extents, live, peak = FreeExtents(), {}, 0, 0
    for event, number, nbytes in events:
        size = -(-nbytes // 4096) * 4096
        if event == "allocate":
            offset = allocator.allocate(size)
            if offset is None:
                allocator.grow(size - allocator.tail_bytes())
                offset = allocator.allocate(size)
            extents[number] = offset
            live += size
            peak = max(peak, live)
        else:
            allocator.free(extents.pop(number), size)
            live -= size
    assert free_in(allocator) == [(0, allocator.end)]
    return allocator.end / peak


@pytest.mark.parametrize("order", ["lifo", "fifo", "random"])
@pytest.mark.parametrize("alive", [0, 1, 4])
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_steps_of_changing_shapes_leave_no_fragments(order, alive, count):
    """The range never grows beyond 1.1 times the peak of live bytes."""
    assert used_over_live(steps(0, count, order, alive)) <= 1.1


def test_random_lifetimes_leave_few_fragments():
    """20,000 sizes from 4 KiB to 32 MiB, each of up to 40 dying at random: at most 1.3 times the peak of live bytes."""

    def events():
        rng, live = random.Random(0), []
        for number in range(20_000):
            nbytes = int(2 ** rng.uniform(12, 25))
            yield "allocate", number, nbytes
            live.append((number, nbytes))
            while len(live) > 40 or (live and rng.random() < 0.45):
                yield "free", *live.pop(rng.randrange(len(live)))
        for number, nbytes in live:
            yield "free", number, nbytes

    assert used_over_live(events()) <= 1.3


def seconds_per_call(count):
    """Of allocate and free among `count` free extents of some 500 lengths."""
    rng, unit = random.Random(0), 4096
    sizes = [rng.randrange(1, 500) * unit for _ in range(count)]
    allocator = FreeExtents(sum(sizes) + count * unit)
    offsets = []
    for size in sizes:
        offsets.append((allocator.allocate(size), size))
        allocator.allocate(unit)  # stays, so that the free ones do not merge
    for extent in offsets:
        allocator.free(*extent)
    assert len(allocator._lengths) == count
    best = float("inf")
    for _ in range(5):
        started = time.thread_time()
        for _ in range(400):
            size = rng.choice(sizes)
            offset = allocator.allocate(size)
            allocator.free(offset, size)
        best = min(best, (time.thread_time() - started) / 800)
    return best


def test_allocation_takes_the_same_time_among_many_free_extents():
    """10 and 100,000 free extents: 0.5 and 0.9 us a call; a scan would take 1,000 times as long among the last."""
    few, many = seconds_per_call(10), seconds_per_call(100_000)
    assert many < 10 * few


# ---- files


def test_steady_steps_do_not_grow_the_file(tmp_path):
    """300 steps of the same 40 tensors, stored and freed in random order, two steps alive at a time: no growth."""
    file = BackingFile(str(tmp_path), step=MIB)
    rng = random.Random(0)
    sizes = [rng.randrange(1, 300 * KIB) for _ in range(40)]
    before, history = [], []
    for _ in range(300):
        live = [file.allocate(nbytes) for nbytes in rng.sample(sizes, len(sizes))]
        for extent in rng.sample(before, len(before)):
            file.free(*extent)
        before = live
        history.append(file.nbytes)
    assert history[-1] == history[2]
    assert os.fstat(file.fd).st_size == file.nbytes
    file.close()


def test_a_file_grows_by_whole_pages(tmp_path):
    """Else, once a Ctrl-C has lost its last bytes, the next extent begins where direct I/O refuses it."""
    file = BackingFile(str(tmp_path), step=4 * KIB)
    for _ in range(100):
        file.allocate(4 * KIB)
        assert file.nbytes % (4 * KIB) == 0
    file.close()


def test_extents_waste_less_than_a_page(tmp_path):
    file = BackingFile(str(tmp_path), step=MIB)
    assert [file.allocate(nbytes) for nbytes in (1, 4096, 4097, 100_000)] == [
        (0, 4096),
        (4096, 4096),
        (8192, 8192),
        (16384, 102_400),
    ]
    file.close()


def test_room_of_a_graph_that_died_serves_another(tmp_path):
    """40 extents of one graph die; the next one's tensors, of other sizes, need no growth."""
    file = BackingFile(str(tmp_path), step=MIB)
    first = [file.allocate(96 * KIB) for _ in range(40)]
    nbytes = file.nbytes
    for extent in first[::2] + first[1::2]:
        file.free(*extent)
    assert sorted(offset for offset, _ in [file.allocate(nbytes // 4) for _ in range(4)]) == [
        i * nbytes // 4 for i in range(4)
    ]
    assert file.nbytes == nbytes
    file.close()


def test_file_is_private_and_has_no_name(tmp_path):
    file = BackingFile(str(tmp_path), step=MIB)
    status = os.fstat(file.fd)
    assert os.listdir(tmp_path) == []
    assert status.st_nlink == 0
    assert status.st_mode & 0o777 == 0o600
    file.close()


class Opening:
    """`os.open` of a file system without O_TMPFILE. `made`: the modes and flags of the files that have names."""

    def __init__(self, monkeypatch, *, direct=True):
        self.made = []
        self._real, self._direct = os.open, direct
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path, flags, mode=0o777, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        self.made.append((mode, flags & (os.O_EXCL | os.O_NOFOLLOW)))
        fd = self._real(path, flags & ~os.O_DIRECT if not self._direct else flags, mode, **more)
        if flags & os.O_DIRECT and not self._direct:
            os.close(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return fd


def test_file_without_o_tmpfile(tmp_path, monkeypatch):
    """An exclusive file for this user, unlinked at once."""
    opening = Opening(monkeypatch)
    file = BackingFile(str(tmp_path), step=MIB)
    monkeypatch.undo()
    assert opening.made == [(0o600, os.O_EXCL | os.O_NOFOLLOW)]
    assert os.listdir(tmp_path) == []
    assert os.fstat(file.fd).st_nlink == 0
    file.close()


def test_file_without_o_tmpfile_and_direct_io(tmp_path, monkeypatch):
    """Linux makes the file, and then refuses O_DIRECT."""
    Opening(monkeypatch, direct=False)
    with pytest.warns(RuntimeWarning, match="takes no direct I/O"):
        file = BackingFile(str(tmp_path), step=MIB)
    assert file.align == 1
    assert os.listdir(tmp_path) == []
    file.close()


def test_file_system_that_renames_what_is_unlinked_while_open(tmp_path, monkeypatch):
    """NFS does so until the file is closed."""
    Opening(monkeypatch)
    monkeypatch.setattr(os, "unlink", lambda path: os.rename(path, os.path.dirname(path) + "/.nfs0001"))
    file = BackingFile(str(tmp_path), step=MIB)
    assert os.listdir(tmp_path) == [".nfs0001"]
    file.close()


def test_direct_io_that_is_accepted_and_not_done(tmp_path, monkeypatch):
    """As ext4 with data=journal: the kernel says of the open file that it has no direct I/O."""
    monkeypatch.setattr(loader, "library", lambda: SimpleNamespace(dio_alignment=lambda *_: -1))
    before = os.listdir("/proc/self/fd")
    with pytest.warns(RuntimeWarning, match="takes no direct I/O"):
        file = BackingFile(str(tmp_path), step=MIB)
    assert file.align == 1
    assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    file.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_fork_while_a_file_is_opened_leaves_the_child_without_it(tmp_path, monkeypatch):
    """The child would hold the file's room when the parent has closed it."""
    real, opened = os.open, threading.Event()

    def slow(*args, **more):
        fd = real(*args, **more)
        opened.set()
        time.sleep(0.3)
        return fd

    monkeypatch.setattr(os, "open", slow)
    files = []
    thread = threading.Thread(target=lambda: files.append(BackingFile(str(tmp_path), step=MIB)))
    thread.start()
    assert opened.wait(10)
    assert in_a_child(lambda: not any(tmp_path in fd.resolve().parents for fd in Path("/proc/self/fd").iterdir()))
    thread.join()
    files[0].close()


# ---- how much is reserved, and when a full drive is tried again


def test_a_growth_that_fails_gives_back_what_it_got(tmp_path, monkeypatch):
    """As ext4 does it on a drive with 8 MiB left: the blocks stay with the file, behind its end."""
    real = os.posix_fallocate

    def fallocate(fd, start, nbytes):
        real(fd, start, min(nbytes, 8 * MIB))
        if nbytes > 8 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    file = BackingFile(str(tmp_path), step=4 * MIB)
    file.allocate(4 * MIB)
    with pytest.raises(OSError, match="growing the file"):
        file.allocate(32 * MIB)
    assert file.nbytes == 4 * MIB
    assert os.fstat(file.fd).st_blocks * 512 <= 4 * MIB + 64 * KIB
    file.close()


@pytest.mark.parametrize("need", [200 * MIB, 1030 * MIB])
def test_little_more_is_reserved_than_is_needed(tmp_path, monkeypatch, need):
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, nbytes: os.ftruncate(fd, start + nbytes))
    file = BackingFile(str(tmp_path))
    for _ in range(need // (5 * MIB)):
        file.allocate(5 * MIB)
    assert need <= file.nbytes <= 1.2 * need
    file.close()


class Drive:
    """A file whose growth fails while `full`, and a clock that tests move."""

    def __init__(self, path, monkeypatch):
        self.full, self.now, self.asked = False, 1000.0, 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "posix_fallocate", self._fallocate)
        self.file = BackingFile(str(path), step=MIB)

    def _fallocate(self, fd, start, nbytes):
        self.asked += 1
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(fd, start + nbytes)

    def takes(self):
        try:
            self.file.room(MIB)
        except OSError:
            return False
        return True


@pytest.mark.filterwarnings("ignore:ssd_fx keeps activations")
def test_a_full_drive_is_tried_again(tmp_path, monkeypatch):
    drive = Drive(tmp_path, monkeypatch)
    assert drive.takes()
    drive.full = True
    assert not drive.takes()
    asked = drive.asked
    for pause in (30, 60, 120):
        drive.now += pause - 1
        assert not drive.takes()
        assert drive.asked == asked  # nothing was tried
        drive.now += 1
        assert not drive.takes()
        assert drive.asked > asked
        asked = drive.asked
    drive.full = False
    assert not drive.takes()
    drive.now += 240
    assert drive.takes()
    assert drive.takes()
    drive.now += 4000
    drive.full = True
    assert not drive.takes()
    drive.now += 30  # the pause is short again
    drive.full = False
    assert drive.takes()
    drive.file.close()


@pytest.mark.filterwarnings("ignore:ssd_fx keeps activations")
def test_failures_at_once_are_one(tmp_path, monkeypatch):
    """Of eight writes under way when the drive fills up."""
    drive = Drive(tmp_path, monkeypatch)
    for _ in range(8):
        drive.file.failed(MIB, OSError(errno.ENOSPC, "failed"))
    drive.now += 30
    assert drive.takes()
    drive.file.close()


@pytest.mark.filterwarnings("ignore:ssd_fx keeps activations")
def test_a_tensor_too_large_for_the_drive_stops_no_other(tmp_path, monkeypatch):
    drive = Drive(tmp_path, monkeypatch)
    with pytest.raises(OSError, match="are free beyond the reserve"):
        drive.file.room(1 << 60)
    assert drive.takes()
    drive.file.close()


@pytest.mark.parametrize(("drive_gib", "may_take_gib"), [(10, 3.5), (1000, 3)])
def test_a_twentieth_of_the_drive_is_left_and_at_most_a_gib(drive_gib, may_take_gib):
    """Of 4 GiB that are free."""
    status = SimpleNamespace(f_frsize=4096, f_blocks=drive_gib << 18, f_bavail=4 << 18)
    assert beyond_the_reserve(status) == may_take_gib * 2**30


@pytest.mark.filterwarnings("ignore:ssd_fx keeps activations")
@pytest.mark.parametrize(("code", "again"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_after_a_failed_write(tmp_path, monkeypatch, code, again):
    """A full drive is tried again; a bad one is not."""
    drive = Drive(tmp_path, monkeypatch)
    drive.file.failed(MIB, OSError(code, "failed"))
    drive.now += 29
    assert not drive.takes()
    drive.now += 4000
    assert drive.takes() is again
    drive.file.close()


def test_the_child_of_a_fork_keeps_no_file(tmp_path):
    """A worker of a data loader lives on. The room comes back when the last descriptor is closed."""
    file = BackingFile(str(tmp_path))
    fd = file.fd

    def is_closed():
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        return file.fd < 0

    assert in_a_child(is_closed)
    os.fstat(fd)
    file.close()
