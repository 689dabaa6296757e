"""The allocator of CPU tensors: no two blocks overlap, idle memory goes back, and nothing that torch does breaks it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR, LEAST, SOURCE

PAGE, CHUNK, MIB = 4096, 2 << 20, 1 << 20
ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(autouse=True)
def installed() -> None:
    CPU_ALLOCATOR.install()
    assert CPU_ALLOCATOR.installed
    CPU_ALLOCATOR.trim()


def run(script: str, *, before: str = "", **environment: str) -> str:
    """What a process prints that has the allocator; `before` runs ahead of its installation."""
    text = f"import torch\n{before}\nfrom ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR as A\nA.install()\n"
    done = subprocess.run(
        [sys.executable, "-c", text + script],
        env=os.environ | environment | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=300,
    )
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
        CPU_ALLOCATOR._library.end_of_step(0) if victim % 3 == 0 else None  # type: ignore[union-attr]
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


def test_a_preloaded_malloc_is_left_alone(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert run("print(A.installed)", LD_PRELOAD=str(library)).strip() == "False"


def test_no_compiler_is_said_aloud(tmp_path: Path) -> None:
    out = run("print(A.installed, torch.ones(1 << 20).sum())", CXX=str(tmp_path / "none"), XDG_CACHE_HOME=str(tmp_path))
    assert "RuntimeWarning" in out
    assert str(tmp_path / "none") in out
    assert "False tensor(1048576.)" in out


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


def test_reserved_addresses_cost_nothing_but_under_a_limit_of_them() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))"
    assert run("print(A.installed)", before=limit).strip() == "False"


def test_the_option_turns_it_off(tmp_path: Path) -> None:
    script = """
import torch, ssd_fx, sys
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR as A
options = {"inner": "aot_eager", "dirs": [sys.argv[1]], "machine": "default"}
torch.compile(lambda x: x.sin().cos(), backend=ssd_fx.backend, options=options | {"cpu_allocator": sys.argv[2]})(
    torch.ones(4, requires_grad=True)).sum().backward()
print(A.installed)
"""
    for given_, expected in (("no", "False"), ("yes", "True")):
        command = [sys.executable, "-c", script, str(tmp_path), given_]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_no_warning_of_the_compiler(tmp_path: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-isystem{include}", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
