"""The arena of recycled memory: nothing overlaps, little is resident, nothing is touched for the first time twice."""

import ctypes
import gc
import mmap
import os
import random
import re
import resource
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_fx.runtime.memory import arena
from ssd_fx.runtime.memory.arena import CHUNK, AddressRange, map_range
from ssd_fx.runtime.memory.buffers import PAGE, BufferPool

KIB, MIB = 1 << 10, 1 << 20
LAYER = [size * MIB for size in (6, 6, 18, 6, 24, 24, 6)]


def flat(pool, nbytes, phase=64):
    return pool.tensor((nbytes,), (1,), torch.uint8, nbytes, phase)


def backward_of_a_gpt(layers=12, window=64 * MIB):
    """("load" | "free", tensor, bytes): each tensor is loaded up to `window` early and lives until its consumer ran."""
    sizes = [nbytes for _ in range(layers) for nbytes in reversed(LAYER)]
    events, loaded = [], 0
    for used in range(len(sizes)):
        while loaded < len(sizes) and (loaded <= used or sum(sizes[used + 1 : loaded + 1]) <= window):
            events.append(("load", loaded, sizes[loaded]))
            loaded += 1
        events.append(("free", used, sizes[used]))
    return events


def resident_in(memory):
    """Bytes of RAM behind the usable part of a range, as the kernel counts them."""
    total = 0
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds:
                start, end = (int(text, 16) for text in bounds.groups())
                inside = memory.address <= start and end <= memory.address + memory.nbytes
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * KIB
    return total


@pytest.mark.parametrize("phase", [0, 64, 4095])
def test_pooled_tensor(phase):
    pool = BufferPool()
    t = pool.tensor((300, 7), (1, 300), torch.float64, 300 * 7 * 8, phase)
    assert t.data_ptr() % PAGE == phase
    assert (t.shape, t.stride(), t.dtype) == ((300, 7), (1, 300), torch.float64)
    assert t.untyped_storage().nbytes() == 300 * 7 * 8
    t.fill_(1)
    assert t.sum() == 2100


def test_memory_comes_back_when_the_last_alias_dies():
    pool = BufferPool()
    t = flat(pool, 100_000)
    address, alias = t.data_ptr(), t[5:].view(5, -1).t()
    del t
    other = flat(pool, 100_000)
    assert other.data_ptr() != address
    del alias
    assert flat(pool, 100_000).data_ptr() == address
    assert pool.mappings == 1  # both fit in one chunk


def test_what_one_size_gave_back_serves_others():
    """6 + 6 + 18 + 2 MiB side by side, freed in any order, are 32 MiB for whoever comes next."""
    pool = BufferPool()
    regions = [pool.take(size * MIB) for size in (6, 6, 18, 2)]
    assert (pool.resident_bytes, pool.mappings) == (32 * MIB, 4)
    for i in (2, 0, 3, 1):
        pool.give(regions[i])
    assert pool.idle_bytes == 32 * MIB
    assert pool.take(32 * MIB).address == regions[0].address
    assert (pool.resident_bytes, pool.mappings) == (32 * MIB, 4)


def test_the_lowest_of_equal_holes_is_taken():
    pool = BufferPool()
    regions = [pool.take(MIB) for _ in range(7)]
    for i in (5, 1, 3):
        pool.give(regions[i])
    assert [pool.take(MIB).address for _ in range(3)] == [regions[i].address for i in (1, 3, 5)]


def test_idle_memory_beyond_the_limit_is_given_back_from_the_top():
    pool = BufferPool(limit=2 * CHUNK)
    regions = [pool.take(CHUNK) for _ in range(5)]
    for region in regions:
        ctypes.memset(region.address, 1, CHUNK)
    memory = pool._arenas[0]._memory
    assert (pool.resident_bytes, resident_in(memory)) == (5 * CHUNK, 5 * CHUNK)
    for region in (regions[4], regions[1], regions[0]):
        pool.give(region)
    assert pool.idle_bytes == 2 * CHUNK
    assert pool.resident_bytes == resident_in(memory) == 4 * CHUNK
    assert ctypes.string_at(regions[0].address, 1) == b"\1"  # the lowest stay
    pool.trim()
    assert pool.resident_bytes == resident_in(memory) == 2 * CHUNK
    assert ctypes.string_at(regions[2].address, CHUNK) == b"\1" * CHUNK
    assert pool.peak_bytes == 5 * CHUNK
    assert pool.take(2 * CHUNK).address == regions[0].address
    assert pool.mappings == 6


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6 * MIB), st.integers(0, 25)), max_size=80),
    st.sampled_from([0, 3 * MIB, 256 * MIB]),
)
def test_regions_never_overlap(script, limit):
    """Live regions are disjoint and usable; all freed, the range is one piece; what is counted adds up."""
    pool, live = BufferPool(limit, reserve=MIB), []
    for nbytes, victim in script:
        if victim < len(live):
            pool.give(live.pop(victim))
        else:
            region = pool.take(nbytes)
            assert region.nbytes == -(-nbytes // PAGE) * PAGE
            for at in (region.address, region.address + region.nbytes - 1):
                ctypes.memset(at, 1, 1)
            assert all(
                region.address + region.nbytes <= other.address or other.address + other.nbytes <= region.address
                for other in live
                if other.arena is region.arena
            )
            live.append(region)
        assert pool.live_bytes == sum(region.nbytes for region in live)
        assert pool.resident_bytes == sum(a._touched.count(1) for a in pool._arenas) * CHUNK
        assert pool.live_bytes <= pool.resident_bytes <= pool.peak_bytes
    for region in live:
        pool.give(region)
        pool.give(region)  # once more, as after a Ctrl-C: it does not mind
    assert [a._allocator.extents() for a in pool._arenas] == [[(0, a._memory.nbytes)] for a in pool._arenas]
    pool.trim()
    assert (pool.resident_bytes, pool.idle_bytes) == (0, 0)


def test_backward_of_a_gpt_stays_close_to_what_is_live():
    """Five steps: 84 MiB are live at most, 92 MiB resident, all of which the first step touched."""
    pool, tensors, live, peak, grown = BufferPool(), {}, 0, 0, []
    for _ in range(5):
        for event, number, nbytes in backward_of_a_gpt():
            if event == "load":
                tensors[number] = flat(pool, nbytes)
            else:
                del tensors[number]
            live += nbytes if event == "load" else -nbytes
            peak = max(peak, live)
        grown.append(pool.mappings)
    assert peak == 84 * MIB
    assert pool.peak_bytes == 92 * MIB
    assert grown == grown[:1] * 5


@pytest.mark.parametrize("seed", range(5))
def test_fragmentation_of_random_lifetimes(seed):
    """5,000 sizes from 4 KiB to 16 MiB, up to 40 alive in random order: at most 1.35 times the peak of live bytes.

    No allocator has a bound that is independent of the sizes; this one is for these.
    """
    rng, pool, live, peak = random.Random(seed), BufferPool(limit=1 << 40), [], 0
    for _ in range(5000):
        live.append(pool.take(int(2 ** rng.uniform(12, 24))))
        peak = max(peak, pool.live_bytes)
        while len(live) > 40 or (live and rng.random() < 0.45):
            pool.give(live.pop(rng.randrange(len(live))))
    assert pool.peak_bytes <= 1.35 * peak


def test_steady_rounds_touch_nothing_new():
    """300 rounds of mixed sizes: no growth, and no page fault by the arena."""
    pool, rng = BufferPool(), random.Random(0)
    sizes = [rng.choice([4 * KIB, 64 * KIB, MIB, 3 * MIB, 5 * MIB]) + rng.randrange(9) * PAGE for _ in range(8)]

    def one_round():
        regions = [pool.take(nbytes) for nbytes in sizes]
        for region in regions:
            for at in range(0, region.nbytes, PAGE):
                ctypes.memset(region.address + at, 1, 1)
        for region in regions[::2] + regions[1::2]:
            pool.give(region)

    for _ in range(3):
        one_round()
    grown, faults = pool.mappings, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(300):
        one_round()
    assert pool.mappings == grown
    # An arena that came back untouched in every round would fault 300 times at least; the rest is the interpreter's.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100


def test_memory_that_dies_during_a_critical_section():
    pool = BufferPool()
    t = flat(pool, MIB, phase=0)
    with pool._guard.lock:
        del t
        assert pool.live_bytes == MIB
    pool._guard.drain()
    assert (pool.live_bytes, pool.idle_bytes) == (0, CHUNK)


def test_pool_in_many_threads_with_collections():
    pool, errors = BufferPool(limit=MIB), []

    def churn(seed):
        rng = random.Random(seed)
        try:
            kept = []
            for i in range(300):
                t = flat(pool, rng.choice([5000, 70_000, 300_000]))
                t.fill_(seed)
                cycle = [t]
                cycle.append(cycle)  # freed by the collector, anywhere
                kept = [*kept, t][-3:]
                assert all((k == seed).all() for k in kept)
                if i % 100 == 0:
                    gc.collect(0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.collect()
    assert errors == []
    pool._guard.drain()
    assert pool._guard._watchers == {}
    assert pool.live_bytes == 0
    assert pool.resident_bytes == 0  # no whole chunk fits under the limit


def test_mapped_memory_of_the_host_is_not_ours_to_count():
    pool = BufferPool()
    mmap.mmap(-1, MIB).close()
    assert pool.resident_bytes == 0


def test_several_ranges_where_addresses_are_limited():
    pool = BufferPool(reserve=4 * MIB)
    regions = [pool.take(3 * MIB) for _ in range(3)] + [pool.take(9 * MIB)]
    assert [a._memory.nbytes for a in pool._arenas] == [4 * MIB, 4 * MIB, 4 * MIB, 10 * MIB]
    for region in regions:
        ctypes.memset(region.address, 7, region.nbytes)
        pool.give(region)
    assert pool.take(3 * MIB).address == regions[0].address
    pool.trim()
    assert pool.resident_bytes == 4 * MIB  # the one in use


def test_a_range_is_halved_until_it_can_be_had(monkeypatch):
    asked = []

    class Limited(AddressRange):
        def __init__(self, nbytes):
            asked.append(nbytes)
            if nbytes > 10 * MIB:
                raise OSError(12, "no addresses")
            super().__init__(nbytes)

    monkeypatch.setattr(arena, "AddressRange", Limited)
    assert map_range(MIB, 64 * MIB).nbytes == 8 * MIB
    assert asked == [64 * MIB, 32 * MIB, 16 * MIB, 8 * MIB]
    with pytest.raises(OSError, match="no addresses"):
        map_range(11 * MIB, 64 * MIB)


def test_no_memory_names_the_bytes_and_loses_none(monkeypatch):
    pool = BufferPool(reserve=64 * MIB)
    pool.take(MIB)
    monkeypatch.setattr(arena, "_libc", type("Refusing", (), {"mprotect": staticmethod(lambda *_: -1)}))
    with pytest.raises(OSError, match=f"no memory for {32 * MIB} B more of buffers"):
        pool.take(40 * MIB)
    monkeypatch.undo()
    assert (pool.live_bytes, pool.resident_bytes) == (MIB, CHUNK)
    assert pool.take(63 * MIB).address == pool._arenas[0].address + MIB


def in_a_process(code):
    """(stdout, stderr, status) of `code` in a fresh interpreter without threads of torch."""
    preamble = "import ctypes, resource, sys, torch\nfrom ssd_fx.runtime.memory.buffers import POOL\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", preamble + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_on_the_process(limit):
    """Of a limit on addresses or data the pool takes what it uses, others have the rest; too much is a clean error."""
    code = f"""
with open("/proc/self/status") as status:
    field = "VmSize:" if "{limit}" == "RLIMIT_AS" else "VmData:"
    used = next(int(line.split()[1]) << 10 for line in status if line.startswith(field))
limit = used + (512 << 20)
resource.setrlimit(resource.{limit}, (limit, limit))
region = POOL.take(200 << 20)
ctypes.memset(region.address, 1, region.nbytes)
others = bytearray(200 << 20)
try:
    POOL.take(400 << 20)
except OSError as error:
    assert error.errno == 12, error
else:
    raise AssertionError("beyond the limit")
small = POOL.take(1 << 20)
ctypes.memset(small.address, 1, small.nbytes)
print("fine")
"""
    out, err, status = in_a_process(code)
    assert (out, status) == ("fine\n", 0), err


def test_reserving_is_charged_to_nobody():
    """The commit charge, which vm.overcommit_memory=2 limits: what is made usable, not what is reserved."""

    def charged(memory):
        with open("/proc/self/smaps") as maps:
            text = maps.read()
        header = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+)", re.M)
        inside = [m for m in header.finditer(text) if memory.address <= int(m[1], 16) < memory.address + memory.nbytes]
        flags = [re.search(r"^VmFlags:(.*)$", text[m.start() :], re.M)[1].split() for m in inside]
        sizes = [int(m[2], 16) - int(m[1], 16) for m in inside]
        return sum(size for size, flag in zip(sizes, flags, strict=True) if "ac" in flag)

    memory = map_range(MIB)
    assert memory.nbytes >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert charged(memory) == 0
    memory.make_usable(1)
    assert charged(memory) == arena.STEP


def test_a_child_has_an_arena_of_its_own():
    """Inherited tensors keep their bytes and may die; the child's memory is its own; the parent's is untouched."""
    code = """
import os
t = POOL.tensor((1 << 20,), (1,), torch.uint8, 1 << 20, 64)
t.fill_(5)
region = POOL.take(4096)
POOL._guard.lock.acquire()  # as if another thread were at work on it
child = os.fork()
if child == 0:
    POOL.after_fork()
    u = POOL.tensor((1 << 20,), (1,), torch.uint8, 1 << 20, 64)
    u.fill_(9)
    POOL.give(region)
    del region  # nothing but the tensor itself holds the inherited memory now
    assert u.data_ptr() != t.data_ptr() and (t == 5).all()
    t.fill_(1)
    del t
    POOL.trim()
    assert (POOL.live_bytes, POOL.resident_bytes) == ((1 << 20) + 4096, 2 << 20), POOL.live_bytes
    print("child fine", flush=True)
    os._exit(0)
POOL._guard.lock.release()
assert os.waitpid(child, 0)[1] == 0
assert (t == 5).all()
print("parent fine")
"""
    out, err, status = in_a_process(code)
    assert (out, status) == ("child fine\nparent fine\n", 0), err
