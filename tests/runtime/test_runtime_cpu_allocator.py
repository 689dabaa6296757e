"""The allocator of CPU tensors: no two blocks overlap, idle memory goes back, and nothing that torch does breaks it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import subprocess
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR, LEAST, SOURCE
from tests import fresh

PAGE, CHUNK, MIB = 4096, 2 << 20, 1 << 20


@pytest.fixture(autouse=True)
def installed() -> None:
    CPU_ALLOCATOR.install()
    assert CPU_ALLOCATOR._library
    CPU_ALLOCATOR.trim()


def run(script: str, *, before: str = "", installs: bool = True, **environment: str) -> str:
    """What a process prints that has the allocator; `before` runs ahead of its installation."""
    text = f"import torch\n{before}\nfrom ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR as A\n"
    text += ("A.install()\n" if installs else "") + script
    decided_at_start = "LD_PRELOAD" in environment
    done = fresh.ended("-c", text, **environment) if decided_at_start else fresh.run(text, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def is_filled(x: torch.Tensor, value: int) -> bool:
    return bool((x == value).all())


def test_large_tensors_begin_at_a_page() -> None:
    live = CPU_ALLOCATOR.live_bytes
    small, large, odd = torch.empty(LEAST - 1, dtype=torch.uint8), filled(LEAST, 0), filled(LEAST + 1, 0)
    assert CPU_ALLOCATOR.live_bytes - live == large.nbytes + odd.nbytes
    assert large.data_ptr() % PAGE == odd.data_ptr() % PAGE == 0
    del small, large, odd
    assert CPU_ALLOCATOR.live_bytes == live


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(LEAST, 9 * MIB), st.booleans(), st.integers(0, 1 << 30)), max_size=40))
def test_blocks_never_overlap(requests: list[tuple[int, bool, int]]) -> None:
    """Each tensor holds its own value for as long as it lives, whatever is taken and given back in between."""
    before, alive = CPU_ALLOCATOR.live_bytes, dict[int, torch.Tensor]()
    for number, (nbytes, frees, victim) in enumerate(requests):
        if frees and alive:
            name = sorted(alive)[victim % len(alive)]
            assert is_filled(alive.pop(name), name)
        alive[number] = filled(nbytes, number)
        CPU_ALLOCATOR._library.end_of_step() if victim % 3 == 0 else None  # type: ignore[union-attr]
        assert CPU_ALLOCATOR.live_bytes - before == sum(x.nbytes for x in alive.values())
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in alive.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(is_filled(x, number) for number, x in alive.items())


def test_neighbours_are_merged() -> None:
    """Three blocks that were freed in any order make room for one of their common size, at the same address."""
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        blocks = [torch.empty(3 * MIB, dtype=torch.uint8) for _ in range(3)]
        wall = torch.empty(MIB, dtype=torch.uint8)  # so that they are not merged with the room behind them
        start = min(x.data_ptr() for x in blocks)
        for i in order:
            blocks[i] = torch.empty(0)
        assert torch.empty(9 * MIB, dtype=torch.uint8).data_ptr() == start
        del wall


def test_idle_memory_goes_back_after_two_steps() -> None:
    used, idle = filled(8 * MIB, 1), filled(32 * MIB, 2)
    touched, resident = CPU_ALLOCATOR.touched_bytes, resident_bytes()
    del idle
    given_back = []
    for _ in range(4):
        CPU_ALLOCATOR.backward()
        CPU_ALLOCATOR.forward()
        given_back.append(touched - CPU_ALLOCATOR.touched_bytes)
    assert given_back[0] == 0
    assert given_back[-1] >= 30 * MIB
    assert resident - resident_bytes() >= 28 * MIB
    assert is_filled(used, 1)


def test_what_every_step_uses_stays() -> None:
    for _ in range(3):
        filled(32 * MIB, 1)
        CPU_ALLOCATOR.backward()
        CPU_ALLOCATOR.forward()
    touched = CPU_ALLOCATOR.touched_bytes
    for _ in range(5):
        filled(32 * MIB, 1)
        CPU_ALLOCATOR.backward()
        CPU_ALLOCATOR.forward()
        assert CPU_ALLOCATOR.touched_bytes == touched


def test_what_was_freed_just_now_is_not_idle() -> None:
    """However long ago it was taken: the next step may take it again."""
    long_lived = filled(32 * MIB, 1)
    touched = CPU_ALLOCATOR.touched_bytes
    for step in range(5):
        if step == 4:
            del long_lived
        CPU_ALLOCATOR.backward()
        CPU_ALLOCATOR.forward()
    assert CPU_ALLOCATOR.touched_bytes > touched - 30 * MIB


def test_idle_memory_leaves_its_neighbours_in_peace() -> None:
    """A tensor ends in the middle of a huge page, which it shares with one that is freed."""
    for _ in range(3):  # whatever the range looks like before
        stays, goes = filled(3 * MIB, 1), filled(9 * MIB, 2)
        del goes
        for _ in range(4):
            CPU_ALLOCATOR.backward()
            CPU_ALLOCATOR.forward()
        assert is_filled(stays, 1)


def test_forwards_without_a_backward_are_no_steps() -> None:
    """As of a model of several graphs: what its last one uses is not idle while the first ones run."""
    filled(32 * MIB, 1)
    touched = CPU_ALLOCATOR.touched_bytes
    CPU_ALLOCATOR.backward()
    for _ in range(5):
        CPU_ALLOCATOR.forward()
    assert CPU_ALLOCATOR.touched_bytes == touched


def test_trim() -> None:
    filled(32 * MIB, 1)
    before = CPU_ALLOCATOR.touched_bytes
    CPU_ALLOCATOR.trim()
    assert CPU_ALLOCATOR.touched_bytes <= before - 30 * MIB
    assert is_filled(filled(32 * MIB, 3), 3)


def test_threads() -> None:
    """Tensors are filled in one thread, and checked and freed in another."""
    before, wrong, handed = CPU_ALLOCATOR.live_bytes, [], [list[tuple[int, torch.Tensor]]() for _ in range(4)]

    def work(me: int) -> None:
        dice = random.Random(me)
        for round_ in range(150):
            value = (me * 151 + round_) % 251
            handed[(me + 1) % 4].append((value, filled(dice.randint(LEAST, 2 * MIB), value)))
            if round_ % 2 and handed[me]:
                value, x = handed[me].pop(0)
                wrong.extend([] if is_filled(x, value) else [value])
            if round_ % 16 == 0:
                CPU_ALLOCATOR.trim()

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    wrong += [value for queue in handed for value, x in queue if not is_filled(x, value)]
    handed.clear()
    assert not wrong
    assert CPU_ALLOCATOR.live_bytes == before


def test_what_torch_does_with_storages() -> None:
    x = torch.arange(MIB, dtype=torch.int32)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.from_numpy(x.numpy().copy()), x.clone()):
        assert torch.equal(other, x)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), x)
    x = torch.arange(MIB, dtype=torch.int32)  # one that NumPy has not seen, which may not be resized
    storage = x.untyped_storage()
    storage.resize_(8 * MIB)
    assert torch.equal(x, torch.arange(MIB, dtype=torch.int32))
    storage.resize_(4 * MIB)
    storage.resize_(0)
    assert torch.empty(0).nbytes == 0
    assert torch.equal(torch.ones(MIB).share_memory_(), torch.ones(MIB))
    assert torch.equal(torch._lazy_clone(y := torch.ones(MIB)), y)


def test_the_profiler_sees_it() -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        x = torch.empty(5 * MIB, dtype=torch.uint8)
        del x
    freed = [event for event in seen.events() if event.name == "[memory]"]
    assert any(event.self_cpu_memory_usage == 5 * MIB for event in seen.events()), freed


def test_a_child_frees_what_its_parent_made() -> None:
    out = run(
        """
import os, threading
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
x = torch.ones(4 << 20)
busy = [True]
def churn():
    while busy: torch.ones(1 << 20)
t = threading.Thread(target=churn); t.start()
for _ in range(5):  # while the other thread may hold the lock
    child = os.fork()
    if not child:
        y = torch.ones(8 << 20); assert y.sum() == y.numel(); assert x.sum() == x.numel()
        x = y = None; A.trim(); assert torch.ones(4 << 20).sum() == 4 << 20
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
busy.clear(); t.join()
assert x.sum() == x.numel()
print("right")
"""
    )
    assert "right" in out


def test_a_process_ends_with_tensors_alive() -> None:
    out = run("import threading\nx = torch.ones(4 << 20)\nthreading.local().y = torch.ones(4 << 20)\nprint('end')\n")
    assert out.strip() == "end"


def preloaded(directory: Path, code: str) -> str:
    """A library of this C++ code, for LD_PRELOAD."""
    source, library = directory / "other.cpp", directory / "other.so"
    source.write_text(code)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


@pytest.mark.slow
def test_a_preloaded_malloc_is_left_alone(tmp_path: Path) -> None:
    library = preloaded(
        tmp_path,
        'extern "C" unsigned long malloc_usable_size(void *) noexcept { return 0; }\n',
    )
    assert run("print(bool(A._library))", LD_PRELOAD=library).strip() == "False"


@pytest.mark.slow
def test_the_address_of_malloc_says_nothing(tmp_path: Path) -> None:
    """In an executable at fixed addresses, as Debian's python3, `malloc` has an address of the executable."""
    library = preloaded(
        tmp_path,
        'extern "C" void *__libc_malloc(unsigned long);\n'
        'extern "C" void *malloc(unsigned long n) noexcept { return __libc_malloc(n); }\n',
    )
    assert run("print(bool(A._library))", LD_PRELOAD=library).strip() == "True"


def test_a_second_installation_changes_nothing() -> None:
    """As after the module was imported again: tensors of the first one are freed as ever."""
    out = run(
        """
import sys, gc
x = torch.ones(4 << 20)
del sys.modules["ssd_fx.runtime.memory.cpu_allocator"]
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR as B
assert B is not A
B.install()
print(bool(B._library), B.live_bytes == A.live_bytes == x.nbytes)
del x
print(A.live_bytes)
"""
    )
    assert out.split() == ["True", "True", "0"]


def test_a_tensor_dies_while_there_is_no_memory(tmp_path: Path) -> None:
    """C++'s `new` fails: a tensor can be freed, blocks are merged, and a request that fails loses no block."""
    library = preloaded(
        tmp_path,
        '#include <cstdlib>\n#include <new>\nextern "C" { int fails = 0; }\n'
        "void *operator new(std::size_t n) { if (fails) throw std::bad_alloc(); return std::malloc(n); }\n",
    )
    out = run(
        f"""
import ctypes
fails = ctypes.c_int.in_dll(ctypes.CDLL({library!r}), "fails")
x = [torch.ones(4 << 20) for _ in range(5)]
address = x[0].data_ptr()
for i in (1, 3, 2, 0):
    fails.value = 1
    x[i] = None
    fails.value = 0
fails.value = 1
try: y = torch.empty(1 << 20)
except (RuntimeError, MemoryError): y = None
fails.value = 0
assert y is None
y = torch.ones(16 << 20)
print(y.data_ptr() == address, A.live_bytes == y.nbytes + x[4].nbytes)
""",
        LD_PRELOAD=library,
    )
    assert out.split() == ["True", "True"]


def test_a_library_that_does_not_load_is_compiled_again(tmp_path: Path) -> None:
    assert run("print(bool(A._library))", XDG_CACHE_HOME=str(tmp_path)).strip() == "True"
    (library,) = (tmp_path / "ssd_fx").glob("allocator-*.so")
    library.write_bytes(b"of another machine")
    assert run("print(bool(A._library))", XDG_CACHE_HOME=str(tmp_path)).strip() == "True"


def test_ctrl_c_while_it_is_compiled(tmp_path: Path) -> None:
    """The next compilation of a model tries again."""
    out = run(
        """
from ssd_fx.runtime.memory import cpu_allocator as c
B, compiles = c.CpuAllocator(), c._load
def interrupted(): raise KeyboardInterrupt
c._load = interrupted
try: B.install()
except KeyboardInterrupt: print(bool(B._library))
c._load = compiles
B.install(); print(bool(B._library))
"""
    )
    assert out.split() == ["False", "True"]


def test_a_fork_while_it_is_installed() -> None:
    out = run(
        """
import os, threading
from ssd_fx.runtime.memory import cpu_allocator as c
inside, go = threading.Event(), threading.Event()
def slow():
    inside.set(); go.wait(); return loads()
loads, c._load = c._load, slow
B = c.CpuAllocator(); os.register_at_fork(after_in_child=B.after_fork)
t = threading.Thread(target=B.install); t.start(); inside.wait()
child = os.fork()
if not child:
    c._load = loads; B.install(); os._exit(0 if B._library else 1)
print(os.waitpid(child, 0)[1]); go.set(); t.join(); print(bool(B._library))
"""
    )
    assert out.split() == ["0", "True"]


def test_a_child_has_no_idle_memory() -> None:
    """Else the parent's next step would copy each page that it writes."""
    out = run(
        """
import os
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
x = torch.ones(4 << 20); y = torch.ones(64 << 20); del y
print(A.touched_bytes >> 20, flush=True)
child = os.fork()
if not child:
    print(A.touched_bytes >> 20, bool((x == 1).all()), flush=True); os._exit(0)
os.waitpid(child, 0)
"""
    )
    parent, child, right = out.split()
    assert int(parent) >= 272
    assert int(child) <= 18
    assert right == "True"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["inference", "nothing"])
def test_idle_memory_goes_back_without_steps(what: str) -> None:
    """Within 15 s where tensors come and go, and within 20 s where nothing happens after a store was made."""
    out = run(
        f"""
import time
from ssd_fx.runtime.deaths import janitor
janitor()
torch.ones(64 << 20); print(A.touched_bytes >> 20)
until = time.time() + 26
while time.time() < until:
    time.sleep(0.1)
    if {what!r} == "inference": torch.ones(1 << 20)
print(A.touched_bytes >> 20)
"""
    )
    before, after = map(int, out.split())
    assert before >= 256
    assert after <= 10


def test_no_compiler_is_said_aloud(tmp_path: Path) -> None:
    out = run(
        "print(bool(A._library), torch.ones(1 << 20).sum())", CXX=str(tmp_path / "none"), XDG_CACHE_HOME=str(tmp_path)
    )
    assert "RuntimeWarning" in out
    assert str(tmp_path / "none") in out
    assert "False tensor(1048576.)" in out


def test_reserved_addresses_cost_nothing_but_under_a_limit_of_them() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))"
    assert run("print(bool(A._library))", before=limit).strip() == "False"


def test_what_is_given_back_counts_no_more() -> None:
    """RLIMIT_DATA leaves room for one of the two: first it is a tensor's, then malloc's, then a tensor's again."""
    out = run(
        """
x = torch.ones(256 << 20); del x; A.trim()
y = bytearray(1 << 30); del y
x = torch.ones(256 << 20); del x; A.trim()
print(bool(A._library), A.touched_bytes)
""",
        before="import resource; resource.setrlimit(resource.RLIMIT_DATA, (1792 << 20, 1792 << 20))",
    )
    assert out.split() == ["True", "0"]


def test_a_limit_of_memory_is_an_error_of_torch() -> None:
    """What the range cannot have, malloc may have; then torch says what it always says."""
    out = run(
        """
x = [torch.ones(1 << 20) for _ in range(8)]
try: torch.ones(1 << 30)
except RuntimeError as e: print(e)
x.clear(); print(torch.ones(1 << 20).sum())
""",
        before="import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))",
    )
    assert "can't allocate memory: you tried to allocate 4294967296 bytes" in out
    assert "tensor(1048576.)" in out


@pytest.mark.parametrize(
    ("option", "trains", "expected"), [("no", True, False), ("yes", True, True), ("yes", False, False)]
)
def test_who_gets_it(tmp_path: Path, option: str, trains: bool, expected: bool) -> None:
    """Who trains, unless the option turns it off. Inference needs none."""
    out = run(
        f"""
import ssd_fx
options = {{"inner": "aot_eager", "dirs": [{str(tmp_path)!r}], "machine": "default", "cpu_allocator": {option!r}}}
y = torch.compile(lambda x: x.sin().cos(), backend=ssd_fx.backend, options=options)(
    torch.ones(4, requires_grad={trains})).sum()
if {trains}: y.backward()
print(bool(A._library))
""",
        installs=False,
    )
    assert out.strip() == str(expected)


def test_no_warning_of_the_compiler(tmp_path: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-isystem{include}", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
