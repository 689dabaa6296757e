"""The life cycles of a training process, one test a row: what is defined to happen, and that it does.

Most run a compiled toy (tests/faults/toys.py) in this process; what forks, dies or counts threads has one of its own.
Rows that live elsewhere: retain_graph (test_training.py); every fault at every call (tests/faults).
"""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import textwrap
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ssd_fx
from ssd_fx.runtime.engines.base import Completion, Engine, Extent, Memory
from ssd_fx.runtime.entries import living
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from tests import fresh
from tests.bitwise import assert_same_bits
from tests.faults.toys import (
    Counting,
    Toy,
    compile_toy,
    complaint,
    descriptors,
    gradients,
    settle,
)
from tests.runtime.engines import Failure, around
from tests.unlike import since


class Trainee:
    """A toy, compiled, with four inputs and the gradients that belong to them."""

    def __init__(self, directory: Path, engine: str = "posix", **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Toy()
        self.inputs = [torch.randn(64, 256) for _ in range(4)]
        kept = compile_toy(self.model, directory, "memory", inner=options.get("inner", "aot_eager"))
        self.expected = [gradients(kept(x), self.model) for x in self.inputs]
        self.compiled = compile_toy(self.model, directory, engine, **options)
        ssd_fx.reset_stats()

    def forward(self, i: int = 0) -> Tensor:
        return self.compiled(self.inputs[i].clone())  # nobody else has it, so that it may leave too

    def backward(self, loss: Tensor, i: int = 0) -> None:
        assert_same_bits(gradients(loss, self.model), self.expected[i])

    def step(self, i: int = 0) -> None:
        loss = self.forward(i)
        settle()
        self.backward(loss, i)


@pytest.fixture
def trainee(tmp_path: Path) -> Trainee:
    return Trainee(tmp_path)


PREAMBLE = """
import gc, os, resource, signal, sys, threading, time, warnings
import torch, ssd_fx
from pathlib import Path
from ssd_fx.runtime.entries import living
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from tests.bitwise import assert_same_bits
from tests.faults.toys import *
from tests.runtime.engines import around
from tests.test_lives import Trainee
torch.set_num_threads(1)  # OpenMP does not survive a fork
where = Path(sys.argv[1])
"""


def start(code: str, directory: Path) -> subprocess.Popen[str]:
    """A fresh interpreter that runs `code` after the preamble."""
    return fresh.started("-c", PREAMBLE + textwrap.dedent(code), directory)


def run(code: str, directory: Path) -> tuple[str, str, int]:
    """(stdout, stderr, status) of such an interpreter."""
    done = fresh.run(PREAMBLE + textwrap.dedent(code), directory)
    return done.stdout, done.stderr, done.returncode


# ---- the disk fails


class FailingWrites(Counting):
    """Writes of the posix engine that fail, each when it is waited for."""

    code = errno.EIO

    def write(self, extent: Extent, memory: Memory) -> Completion:
        return Failure(self.code)


@pytest.mark.parametrize(
    ("code", "inner"),
    [
        (errno.ENOSPC, "aot_eager"),
        (errno.EIO, "aot_eager"),
        (errno.EDQUOT, "aot_eager"),
        pytest.param(errno.EIO, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_write_fails(tmp_path: Path, code: int, inner: str) -> None:
    """The tensors stay, training goes on, one warning names path and bytes, the directory takes nothing more."""
    made: list[FailingWrites] = []

    def wrap(inner: Engine) -> FailingWrites:
        made.append(FailingWrites(inner))
        made[-1].code = code
        return made[-1]

    name = around(wrap)
    trainee = Trainee(tmp_path, name, inner=inner)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for i in range(3):
            trainee.step(i)
    (told,) = [str(w.message) for w in warned if issubclass(w.category, RuntimeWarning)]
    assert f"keeps activations in memory that do not go to {tmp_path}: storing " in told
    assert " B failed (a planted failure)" in told
    stats = ssd_fx.stats()
    assert 1 <= len(made[0].refused) <= stats.stores // 3  # after the first step, if not before, there is no room
    assert (stats.written_bytes, stats.kept_bytes) == (0, stats.offloaded_bytes)
    assert not made[0].out


def test_a_read_fails(tmp_path: Path) -> None:
    """OSError with path, offset, bytes and the tensor; then, in the same process, a right step."""
    made: list[Counting] = []

    def wrap(inner: Engine) -> Counting:
        made.append(Counting(inner))
        return made[-1]

    name = around(wrap)
    trainee = Trainee(tmp_path, name)
    loss = trainee.forward()
    settle()
    (path,) = {path for path in descriptors().values() if path.startswith(str(tmp_path))}
    (fd,) = [int(fd) for fd, at in descriptors().items() if at == path]
    size = os.fstat(fd).st_size
    os.truncate(f"/proc/self/fd/{fd}", 0)
    with pytest.raises(OSError, match="end of the file") as caught:
        gradients(loss, trainee.model)
    assert not complaint(caught.value, [str(tmp_path)])
    del loss, caught
    gc.collect()  # the error's frames
    assert living() == []
    assert not made[0].out
    os.truncate(f"/proc/self/fd/{fd}", size)
    trainee.step()


# ---- the process ends


@pytest.mark.slow
def test_the_interpreter_exits_with_writes_in_flight(tmp_path: Path) -> None:
    """Late writes, a graph that still lives, staged loads: a clean exit without a word."""
    code = """
        from tests.rates import QUICK
        late = around(lambda inner: Late(inner, 3600, 3600))
        trainee = Trainee(where, late, machine=QUICK)  # a plan in which no release waits for its write
        losses = [trainee.forward(i) for i in range(4)]
        trainee.backward(losses[0])
        fast = Trainee(where)
        losses.append(fast.forward())
        print("leaving", flush=True)
    """
    assert run(code, tmp_path) == ("leaving\n", "", 0)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_in_each_wait(tmp_path: Path) -> None:
    """A KeyboardInterrupt in a forward that waits for writes and in a backward that waits for a read: nothing is left.

    The engine is stuck until it is told to go on. The next step is right.
    """
    code = """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what shells run in the background ignores it
        class Stuck(Counting):
            stuck = False
            def write(self, extent, memory):
                return Held(super().write(extent, memory), "write")
            def read(self, extent, memory):
                return Held(super().read(extent, memory), "read")
        class Held:
            def __init__(self, inner, what):
                self.inner, self.what = inner, what
            def __getattr__(self, name):
                return getattr(self.inner, name)
            def held(self):
                return Stuck.stuck == self.what
            def done(self):
                return not self.held() and self.inner.done()
            def wait(self):
                while self.held():
                    time.sleep(0.01)
                self.inner.wait()
        engines = []
        def make(inner):
            engines.append(Stuck(inner))
            return engines[-1]
        trainee = Trainee(where, around(make), inflight=1)
        trainee.step()
        def interrupted(action):
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            try:
                action()
            except KeyboardInterrupt:
                return True
        for what in ("write", "read"):
            for _ in range(3):
                if what == "read":
                    loss = trainee.forward()
                    settle()
                Stuck.stuck = what
                assert interrupted((lambda: trainee.backward(loss)) if what == "read" else trainee.forward), what
                Stuck.stuck = False
                loss = None
                gc.collect()
                assert living() == [], living()
                assert not engines[0].out
                trainee.step()
        print("fine")
    """
    assert run(code, tmp_path) == ("fine\n", "", 0)


# ---- fork, beside that between forward and backward (last)


@pytest.mark.slow
def test_workers_of_a_data_loader(tmp_path: Path) -> None:
    """They are forked while activations are stored, and nobody notices."""
    code = """
        from torch.utils.data import DataLoader
        trainee = Trainee(where)
        data = torch.stack(trainee.inputs)
        waiting = trainee.forward(3)
        for epoch in range(2):
            loader = DataLoader(torch.utils.data.TensorDataset(data, torch.arange(4)), num_workers=2, batch_size=None)
            for x, i in loader:
                loss = trainee.compiled(x)
                settle()
                trainee.backward(loss, int(i))
        trainee.backward(waiting, 3)
        del loss, waiting, loader
        assert living() == []
        print("fine")
    """
    assert run(code, tmp_path) == ("fine\n", "", 0)
    assert os.listdir(tmp_path) == []


# ---- graphs that take another way


def test_an_exception_between_forward_and_backward(trainee: Trainee) -> None:
    """The graph dies with the frame that held it, and its entries with it."""

    def train() -> None:
        loss = trainee.forward()
        raise ArithmeticError(f"the loss is {loss.item()}")

    with pytest.raises(ArithmeticError) as caught:
        train()
    del caught
    gc.collect()
    assert living() == []
    trainee.step()


@pytest.mark.parametrize("forwards", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_backward_that_never_comes(trainee: Trainee, forwards: int) -> None:
    """Neither entries nor the file nor the memory of tensors grow."""
    trainee.step()
    before, live = ssd_fx.stats(), CPU_ALLOCATOR.live_bytes
    per_step = before.stores
    for i in range(forwards):
        trainee.forward(i % 4)
    assert living() == []
    after = ssd_fx.stats()
    assert after.stores == (1 + forwards) * per_step
    assert after.disk_bytes == before.disk_bytes
    assert CPU_ALLOCATOR.live_bytes <= live
    trainee.step()


@pytest.mark.parametrize(
    ("order", "inner"),
    [
        ("first in first out", "aot_eager"),
        ("last in first out", "aot_eager"),
        ("random", "aot_eager"),
        pytest.param("random", "inductor", marks=pytest.mark.slow),
    ],
)
def test_64_micro_batches_in_flight(tmp_path: Path, order: str, inner: str) -> None:
    """Every backward gets its own forward's tensors, and the extents of 64 graphs are reused by the next 64."""
    trainee = Trainee(tmp_path, inner=inner)
    disk = []
    for seed in range(2):
        losses = [(i % 4, trainee.forward(i % 4)) for i in range(64)]
        assert len(living()) % 64 == 0
        assert living()
        if order == "last in first out":
            losses.reverse()
        elif order == "random":
            random.Random(seed).shuffle(losses)
        while losses:
            i, loss = losses.pop(0)
            trainee.backward(loss, i)
            del loss
        assert living() == []
        disk.append(ssd_fx.stats().disk_bytes)
    assert disk[0] == disk[1]


def test_a_backward_on_another_thread(trainee: Trainee) -> None:
    with ThreadPoolExecutor(1) as other:
        for i in range(4):
            loss = trainee.forward(i)
            settle()
            other.submit(trainee.backward, loss, i).result(timeout=60)
            del loss
    assert living() == []


def test_two_threads_train(tmp_path: Path) -> None:
    """Each its own model, with one store between them: no gradient is the other's."""
    trainees = [Trainee(tmp_path), Trainee(tmp_path)]
    with torch.no_grad():
        for parameter in trainees[1].model.parameters():
            parameter.mul_(0.5)
    kept = compile_toy(trainees[1].model, tmp_path, "memory")
    trainees[1].expected = [gradients(kept(x), trainees[1].model) for x in trainees[1].inputs]
    for trainee in trainees:
        trainee.step()  # compiled by one thread after the other, as torch asks for
    failed: list[BaseException] = []

    def train(trainee: Trainee) -> None:
        try:
            for i in range(100):
                trainee.backward(trainee.forward(i % 4), i % 4)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train, args=(trainee,)) for trainee in trainees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []
    assert living() == []


def test_gradients_of_some(trainee: Trainee) -> None:
    """autograd.grad of a subset: right, and what was stored for the others goes too."""
    loss = trainee.forward()
    settle()
    chosen = [1, 4]
    parameters = list(trainee.model.parameters())
    found = list(torch.autograd.grad(loss, [parameters[i] for i in chosen]))
    assert_same_bits(found, [trainee.expected[0][i] for i in chosen])
    del loss
    assert living() == []


def test_inference_costs_nothing(tmp_path: Path) -> None:
    """no_grad and inference_mode: no entry, no file, no descriptor, no thread."""
    code = """
        model, x = Toy(), torch.randn(64, 256)
        compiled = compile_toy(model, where, "posix")
        torch.compile(lambda x: x + 1, backend="aot_eager")(x)  # what torch itself starts
        def resources():
            tasks = sorted(Path("/proc/self/task", name, "comm").read_text() for name in os.listdir("/proc/self/task"))
            return tasks, sorted(descriptors().values()), [thread.name for thread in threading.enumerate()]
        before = resources()
        with torch.no_grad():
            compiled(x)
        with torch.inference_mode():
            compiled(x)
        assert resources() == before, (before, resources())
        stats = ssd_fx.stats()
        assert (stats.stores, stats.disk_bytes, living()) == (0, 0, []), stats
        gradients(compiled(x), model)
        assert resources() != before
        print("fine")
    """
    assert run(code, tmp_path) == ("fine\n", "", 0)


# ---- what is around a compiled step


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"), reason="stock fails too")
@pytest.mark.parametrize("how", ["function", "name", "explain"])
def test_parameters_can_be_swapped_after_a_compilation(how: str) -> None:
    """By `torch.utils.swap_tensors`, which weak references to a parameter forbid. `Module.to` uses it for some."""
    code = """
        import sys
        import torch
        model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
        options = {"engine": "memory", "min_bytes": 0, "machine": "default", "inner": "aot_eager"}
        how = sys.argv[1]
        if how == "name":
            torch.compile(model, backend="ssd_fx", options=options)(x).sum().backward()
        import ssd_fx
        if how == "explain":
            ssd_fx.explain(model, options=options)(x)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=ssd_fx.backend, options=options)
        compiled(x).sum().backward()
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.to(torch.float64)
        torch.compile(model, backend="ssd_fx", options=options)(x.double()).sum().backward()
        print(model[0].weight.grad.dtype)
    """
    done = fresh.run(code, how)
    assert (done.stdout, done.returncode) == ("torch.float64\n", 0), done.stderr


@pytest.mark.parametrize("mode", ["_subclasses.FakeTensorMode()", "inference_mode()", "device('meta')"])
def test_the_package_may_be_imported_in_any_mode(tmp_path: Path, mode: str) -> None:
    code = f"""
        import sys
        import torch
        with torch.{mode}:
            import ssd_fx
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        options = {{"dirs": [sys.argv[1]], "budget": 0, "min_bytes": 0, "machine": "default", "inner": "aot_eager"}}
        compiled = torch.compile(model, backend=ssd_fx.backend, options=options)
        for _ in range(3):
            compiled(torch.randn(9, 64)).sum().backward()
        print(ssd_fx.stats().written_bytes > 0)
    """
    done = fresh.run(code, tmp_path)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


# ---- the process around it


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_garbage_collector_is_off(trainee: Trainee) -> None:
    """Reference counts alone free entries, extents and the memory of tensors."""
    for i in range(4):
        trainee.step(i)
    before, live = ssd_fx.stats(), CPU_ALLOCATOR.live_bytes
    for i in range(50):
        trainee.step(i % 4)
        assert living() == []
    after = ssd_fx.stats()
    assert after.disk_bytes == before.disk_bytes
    assert CPU_ALLOCATOR.live_bytes <= live


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_garbage_collector_is_off_and_the_directory_retired(tmp_path: Path) -> None:
    """A refused allocation keeps nothing alive: else every step's activations stay until a collection."""
    name = around(FailingWrites)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        trainee = Trainee(tmp_path, name)
        for i in range(3):
            trainee.step(i)
            assert living() == []


def test_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory is the one at the first call, when torch compiles."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainee = Trainee(Path("."))
    trainee.step()
    monkeypatch.chdir(tmp_path / "there")
    loss = trainee.forward()
    settle()
    monkeypatch.chdir("/")
    trainee.backward(loss)
    del loss
    trainee.step(1)
    files = [path for path in descriptors().values() if path.startswith(str(tmp_path))]
    assert [Path(path).parent for path in files] == [tmp_path / "here"]


# ---- ssd_fx.checkpoint

CHECKPOINTS = """
        from functools import partial
        options = {"dirs": [str(where)], "min_bytes": 0, "allow_tmpfs": True}
        region = partial(ssd_fx.checkpoint, options=options)
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(3))
        data = torch.randn(4, 32, 64)

        def forward(i, region=region):
            x = data[i] * 1
            for block in blocks:
                x = region(block, x)
            return x.square().sum()

        def backward(loss):
            return torch.autograd.grad(loss, list(blocks.parameters()))

        plain = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        expected = [backward(forward(i, plain)) for i in range(4)]

        def prove(loss, i):
            assert_same_bits(backward(loss), expected[i])
"""


def test_a_checkpoint_of_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """It has neither a name in the directory, nor space on the drive behind one."""
    code = """
        print("ready", flush=True)
        while True:
            loss = forward(0)
            settle()
            backward(loss)
    """
    with start(textwrap.dedent(CHECKPOINTS) + textwrap.dedent(code), tmp_path) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n", process.communicate()
        assert os.listdir(tmp_path) == []
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


OF_A_TRAINEE = """
        trainee = Trainee(where)
        forward, prove = trainee.forward, trainee.backward
"""
REFUSED = since((2, 15), "PyTorch itself refuses a backward in the child of a process that ran a compiled one")


@pytest.mark.parametrize(
    "whose",
    [pytest.param(OF_A_TRAINEE, marks=[pytest.mark.slow, REFUSED]), CHECKPOINTS],
    ids=["trainee", "checkpoints"],
)
def test_a_fork_between_forward_and_backward(tmp_path: Path, whose: str) -> None:
    """The child's backward of the parent's graph is refused, its own step is right, and so is the parent's backward."""
    code = """
        loss = forward(0)
        settle()
        child = os.fork()
        if not child:
            try:
                prove(loss, 0)
            except RuntimeError as error:
                assert "parent process before a fork" in str(error), error
                del loss
                prove(forward(1), 1)
                print("child fine", flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        prove(loss, 0)
        prove(forward(2), 2)
        del loss
        gc.collect()
        assert living() == []
        print("parent fine")
    """
    assert run(textwrap.dedent(whose) + textwrap.dedent(code), tmp_path) == ("child fine\nparent fine\n", "", 0)
    assert os.listdir(tmp_path) == []


def test_a_child_finds_no_lock_that_another_thread_had(tmp_path: Path) -> None:
    """All locks of our modules; but for the one that every fork waits for, because its holder opens a file."""
    code = """
        kinds = type(threading.Lock()), type(threading.RLock())
        modules = [module for name, module in sys.modules.items() if name.startswith("ssd_fx")]
        names = {id(lock): (m, n) for m in modules for n, lock in vars(m).items() if isinstance(lock, kinds)}
        held = [(m, n) for m, n in names.values() if n != "_no_fork"]
        taken, forked = threading.Event(), threading.Event()

        def hold():
            for module, name in held:
                getattr(module, name).acquire()
            taken.set()
            forked.wait()

        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        child = os.fork()
        if not child:
            print([f"{m.__name__}.{n}" for m, n in held if not getattr(m, n).acquire(timeout=1)], flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        forked.set()
        print(len(held) > 3)
    """
    assert run(code, tmp_path) == ("[]\nTrue\n", "", 0)
