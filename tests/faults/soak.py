"""A soak: random models train under random faults until thousands were met.

python -m tests.faults.soak DIRECTORY --faults 5000 --corrupt     with faultio.c preloaded (tests/faults/faultio.py)

An episode draws a model, the engine (writes in order, or late, in any order), how much may be in flight, the rules
of the faults, and a schedule of micro-batches over two directories: how many forwards, in which order their backwards,
which graphs die without one, whether the writes end before the backwards. Every backward ends in the right gradients,
bit by bit, or in an OSError that names path, offset, bytes and tensor. After an episode no entry, extent, thread,
descriptor or file is left, and over all of them the memory stays flat. An episode that hangs ends the process with all
stacks. `--without-checksums` is the harness's own test: bytes that are damaged on their way must then come out as wrong
gradients, and be found.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import errno
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ssd_fx
from ssd_fx.runtime.engines.base import Engine
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.runtime.entries import GUARD, living
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.stores import close_stores
from tests.bitwise import assert_same_bits, differences
from tests.faults.faultio import Action, Call, Faults
from tests.faults.toys import (
    Counting,
    Late,
    Toy,
    compile_toy,
    complaint,
    descriptors,
    fill_the_trace,
    gradients,
    settle,
)

HANG_S = 60
INPUTS = 4
GROWTH_BYTES = 48 << 20  # what the resident memory may grow by after the first fifth: heaps have holes
CORRUPT = (Action.FLIP, Action.LOST, Action.ZEROS)
HARMLESS = (errno.EINTR, Action.SHORT)  # they end nothing, so at a high rate they would be most of the faults
PLAIN = {
    Call.WRITE: (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINTR, Action.SHORT, Action.NOTHING),
    Call.READ: (errno.EIO, errno.EINTR, Action.SHORT, Action.NOTHING),
    Call.ALLOCATE: (errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EOPNOTSUPP),
    Call.TRUNCATE: (errno.ENOSPC, errno.EFBIG),
}


class WrongGradients(AssertionError):
    """A backward gave other bits than it should."""


@dataclass
class Report:
    """What was met."""

    episodes: int = 0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    met: collections.Counter[str] = field(default_factory=collections.Counter)
    resident_bytes: list[int] = field(default_factory=list)

    @property
    def delays(self) -> int:
        return sum(count for name, count in self.met.items() if name.endswith("SLEEP"))

    @property
    def faults(self) -> int:
        """Without the delays."""
        return self.met.total() - self.delays

    def tenths(self) -> list[int]:
        """Resident bytes after each tenth of the episodes."""
        return [self.resident_bytes[-(-len(self.resident_bytes) * n // 10) - 1] for n in range(1, 11)]

    def lines(self) -> list[str]:
        return [
            f"{self.episodes} episodes, {self.faults} faults, {self.delays} delays",
            "outcomes: " + ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items())),
            "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(self.met.items())),
            "resident after each tenth, MiB: " + " ".join(str(size >> 20) for size in self.tenths()),
        ]


class Trainee:
    """A toy, compiled for the soak with much and with little in flight, and its gradients for a few inputs."""

    def __init__(self, model: Toy, shape: tuple[int, int], directories: list[str], checksums: bool) -> None:
        self.model = model
        self.inputs = [torch.randn(shape) for _ in range(INPUTS)]
        kept = compile_toy(model, directories[0], "memory")
        self.expected = [gradients(kept(x), model) for x in self.inputs]
        self.compiled: list[Callable[[Tensor], Tensor]] = []
        for inflight in (1 << 16, 128 << 20):
            made = compile_toy(model, directories[0], "soak", dirs=directories, inflight=inflight, checksums=checksums)
            self.compiled.append(made)
            ssd_fx.reset_stats()
            assert_same_bits(gradients(made(self.inputs[0]), model), self.expected[0], "without faults")
            assert ssd_fx.stats().stores >= 3, "nothing leaves"


class Soak:
    """Episodes in `directories` until enough faults were met."""

    def __init__(self, directories: list[str], seed: int, corrupt: bool, checksums: bool) -> None:
        self.directories, self.corrupt = directories, corrupt
        self.random = random.Random(seed)
        self.report = Report()
        self.engines: list[Counting] = []
        self.late = False
        ENGINES["soak"] = self._engine
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        torch._dynamo.config.recompile_limit = 64  # all toys share one forward
        self.trainees = [
            Trainee(model, shape, directories, checksums)
            for model, shape in (
                (Toy(layers=1, width=64), (9, 64)),
                (Toy(layers=3, width=256), (65, 256)),
                (Toy(layers=2, width=200), (127, 200)),
                (Toy(layers=2, width=256, wide=1200), (64, 256)),
            )
        ]
        self.close()
        fill_the_trace()
        self.faults = Faults(os.path.dirname(directories[0]))  # the rules are for all that is under it
        self.before = collections.Counter(descriptors().values())
        self.live_bytes = CPU_ALLOCATOR.live_bytes
        self.threads = set(threading.enumerate())  # that of tqdm, which torch uses where it is installed, among them
        gc.collect()
        gc.freeze()

    def run(self, enough: int, seconds: float) -> Report:
        """Episodes until `enough` faults or `seconds` are over."""
        until = time.monotonic() + seconds
        while self.report.faults < enough and time.monotonic() < until:
            self.episode()
        return self.report

    def episode(self) -> None:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        self.late = self.random.random() < 0.3
        trainee = self.random.choice(self.trainees[:3] * 3 + self.trainees[3:])
        compiled = self.random.choice(trainee.compiled)
        self.faults.reset()
        self.arm()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for _ in range(self.random.randint(1, 4)):
                self.schedule(trainee, compiled)
        self.faults.disarm()
        self.report.met.update(self.faults.count_by_name())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            assert_same_bits(gradients(compiled(trainee.inputs[0]), trainee.model), trainee.expected[0], "after faults")
        self.close()
        self.report.episodes += 1
        self.report.resident_bytes.append(resident_bytes())
        faulthandler.cancel_dump_traceback_later()

    def arm(self) -> None:
        """Draws the rules."""
        if self.random.random() < 0.2:
            for call in (Call.WRITE, Call.READ):
                milliseconds = self.random.randint(1, 5)
                self.faults.some(call, Action.SLEEP, 0.2, self.random.getrandbits(32), milliseconds)
        for _ in range(self.random.randint(1, 3)):
            call = self.random.choice([Call.WRITE, Call.WRITE, Call.READ, Call.READ, Call.ALLOCATE, Call.TRUNCATE])
            possible: tuple[int, ...] = PLAIN[call]
            if self.corrupt and call in (Call.WRITE, Call.READ):
                possible = (*possible, *CORRUPT)
            action = self.random.choice(possible)
            rate = self.random.choice([0.02, 0.1] if action in HARMLESS else [0.02, 0.1, 0.4, 0.9])
            self.faults.some(call, action, rate, self.random.getrandbits(32))

    def schedule(self, trainee: Trainee, compiled: Callable[[Tensor], Tensor]) -> None:
        """Forwards, then the backwards in some order; some never come."""
        losses = []
        for _ in range(self.random.randint(1, 5)):
            chosen = self.random.randrange(INPUTS)
            losses.append((chosen, compiled(trainee.inputs[chosen].clone())))
        match self.random.choice(["first in first out", "last in first out", "random"]):
            case "last in first out":
                losses.reverse()
            case "random":
                self.random.shuffle(losses)
        if self.random.random() < 0.7:
            settle()
        while losses:
            chosen, loss = losses.pop(0)
            if self.random.random() < 0.1:
                self.report.outcomes["dropped"] += 1
                continue
            self.report.outcomes[self.backward(trainee, chosen, loss)] += 1

    def backward(self, trainee: Trainee, chosen: int, loss: Tensor) -> str:
        """How a backward ends.

        Raises: WrongGradients.
        """
        try:
            found = gradients(loss, trainee.model)
        except OSError as error:
            missing = complaint(error, self.directories)
            if missing:
                raise AssertionError(f"the error does not name {missing}") from error
            return "named error"
        if differences(found, trainee.expected[chosen]):
            raise WrongGradients(f"episode {self.report.episodes}, input {chosen}")
        return "right"

    def close(self) -> None:
        """Nothing is left."""
        gc.collect()
        GUARD.drain()
        left = [f"{entry.name} in {entry.store.engine.name}" for entry in living()]
        assert not left, f"entries {left}"
        for engine in self.engines:
            assert not engine.out, f"extents {engine.out}"
        self.engines.clear()
        close_stores()
        for directory in self.directories:
            assert os.listdir(directory) == [], f"files {os.listdir(directory)}"
        if hasattr(self, "before"):
            new = collections.Counter(descriptors().values()) - self.before
            assert not new, f"descriptors {new}"
            live = CPU_ALLOCATOR.live_bytes - self.live_bytes
            assert live <= 0, f"{live} B of tensors"
            for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer)]:
                timer.join()  # of a late write that was cancelled
            threads = [t.name for t in set(threading.enumerate()) - self.threads if "janitor" not in t.name]
            assert not threads, f"threads {threads}"

    def _engine(self, config: object) -> Engine:
        inner = ENGINES["posix"](config)  # type: ignore[arg-type]
        if self.late:
            inner = Late(inner, 0.0, 0.02, seed=self.random.getrandbits(32))
        engine = Counting(inner)
        self.engines.append(engine)
        return engine


def resident_bytes() -> int:
    """What the process has in memory, less what its heap only keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    CPU_ALLOCATOR.trim()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--faults", type=int, default=5000, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=3600, help="at most, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corrupt", action="store_true", help="bytes are damaged too")
    parser.add_argument("--without-checksums", action="store_true", help="and nobody is to notice but the harness")
    flags = parser.parse_args()
    directories = [os.path.join(os.path.realpath(flags.directory), name) for name in ("a", "b")]
    for directory in directories:
        os.makedirs(directory, exist_ok=True)
    soak = Soak(directories, flags.seed, flags.corrupt, not flags.without_checksums)
    try:
        report = soak.run(flags.faults, flags.seconds)
    except WrongGradients as error:
        soak.report.met.update(soak.faults.count_by_name())
        print(f"WRONG GRADIENTS after {soak.report.faults} faults: {error}", flush=True)
        sys.exit(3)
    print("\n".join(report.lines()), flush=True)
    sizes = report.tenths()
    assert sizes[-1] < sizes[1] + GROWTH_BYTES, f"memory grew from {sizes[1]} B to {sizes[-1]} B"


if __name__ == "__main__":
    main()
