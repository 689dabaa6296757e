"""Training processes that make one step whenever they are asked to, so that ways to train can be compared in turns.

    with Workers({"keep": Task(...), "ssd_fx": Task(...)}) as workers:
        workers.compile()              # one after another
        for steps in workers.rounds(10):
            steps["keep"].time_s, steps["ssd_fx"].time_s

How it is measured:
- One process for each way, with equal weights, data and seeds. In one process they would share a heap, and the pages
  that one model touched would be warm for the other. All but one of them sleep.
- A round is one step of every process; the order changes from round to round. Steps of one round see the same machine,
  so their ratios mean something where the times themselves do not.
- ssd_fx would give back the memory of a process that waits for its turn (`turns.hold_memory`).
- What a step is and how its memory is counted: training.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from types import TracebackType
from typing import IO

import peak  # neighbours of this file
import training
from training import Step, Task

PAUSE_S = 0.05  # between turns: OpenMP's threads spin for some milliseconds after their last parallel region


class Ended(SystemExit):
    """A worker has ended, which ends the benchmark unless it knows what to make of it. `worker`: its name."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(text)
        self.worker = worker


def _settings(task: Task) -> dict[str, str]:
    """Of PyTorch: compilers that a limited process starts would have limits of their own, and no cache may keep what is
    compiled with a part switched off."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if task.limit_bytes else {}
    return settings | ({"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} if task.without else {})


class Worker:
    """A process that makes one step whenever it is asked to."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, training.__file__, json.dumps(asdict(task))],
            env=os.environ | peak.environment(task.preload) | _settings(task),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def step(self) -> Step:
        requests, answers = self._pipes()
        try:
            print("step", file=requests)
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Ended(self.name, f"the {self.name} worker ended with {self._process.wait()}; its message is above")
        return Step(**json.loads(answer))

    @property
    def process(self) -> int:
        """Its id."""
        return self._process.pid

    def stop(self) -> None:
        for pipe in self._pipes():
            pipe.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


class Workers:
    """One worker for every task; leaving the context ends them."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = dict(tasks)
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers.values():
            worker.stop()

    def compile(self) -> dict[str, float]:
        """Start all, each when the one before has made its first step; seconds of the first steps."""
        return {name: self.start(name, task) for name, task in self.tasks.items()}

    def start(self, name: str, task: Task) -> float:
        """Start one; seconds of its first step.

        Raises:
            Ended: it failed.
        """
        print(f"{name}: compiling, which may take a minute ...", file=sys.stderr, flush=True)
        self.workers[name] = Worker(name, task)
        first_s = self.workers[name].step().time_s
        print(f"{name}: first step (compiles) {first_s:.1f} s", file=sys.stderr, flush=True)
        return first_s

    def rounds(self, count: int) -> Iterator[dict[str, Step]]:
        """`count` rounds of one step of every worker."""
        for number in range(count):
            steps = {}
            for name in order(list(self.workers), number):
                time.sleep(PAUSE_S)
                steps[name] = self.workers[name].step()
            yield {name: steps[name] for name in self.workers}


def order(names: Sequence[str], number: int) -> list[str]:
    """The order of round `number`: another one begins each time, and neighbours change sides in every second round."""
    turn = (number // 2) % len(names)
    rotated = [*names[turn:], *names[:turn]]
    return rotated if number % 2 == 0 else rotated[::-1]


def ratios(steps: Sequence[Step], reference: Sequence[Step]) -> list[str]:
    """Two cells of a table: times to those of the same rounds, as median and quartiles; the median of CPU times."""
    wall = sorted(a.time_s / b.time_s for a, b in zip(steps, reference, strict=True))
    cpu = median(a.cpu_s / b.cpu_s for a, b in zip(steps, reference, strict=True))
    quarter = len(wall) // 4
    return [f"{median(wall):.3f} ({wall[quarter]:.3f} to {wall[-1 - quarter]:.3f})", f"{cpu:.3f}"]


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
