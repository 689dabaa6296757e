"""Parts of a long check: rows of processes with a limit of time, none of which stops another. For gpu_parts.py."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """`commands` run one after the other, together for at most `limit_s`, with {python}, {dir} and others filled in.

    `alone`: times are taken, so nothing else may run. `needs`: a program, or "module NAME", without which there is
    nothing to run.
    """

    name: str
    what: str
    limit_s: int
    commands: tuple[str, ...]
    alone: bool = True
    needs: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a part ended: "ok", "skipped: ..." or what failed."""

    name: str
    result: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.result != "ok" and not self.result.startswith("skipped")


class Processes:
    """Those of all parts that run, each with a session of its own. Once they are ended no other starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    @contextlib.contextmanager
    def started(
        self, words: Sequence[str], environment: Mapping[str, str], deadline: float
    ) -> Iterator[subprocess.Popen[str]]:
        """Raises: OSError if the program cannot be run, all were ended, or the deadline is over."""
        if time.monotonic() >= deadline:
            raise TimeoutError("no time was left for it")
        path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH", ""))))
        with self._lock:
            if self._ended:
                raise InterruptedError("interrupted before it began")
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its thread is about to say so
                    os.killpg(process.pid, signal.SIGKILL)


def filled(command: str, where: Mapping[str, str]) -> list[str]:
    """The command's words. What is filled in is one word, whatever it is made of."""
    return [word.format(**where) for word in shlex.split(command)]


def run(parts: Sequence[Part], where: Mapping[str, str], out: Path) -> Iterator[Ended]:
    """All parts, whatever becomes of them, as they end. Neighbours that may run at once do."""
    processes = Processes()

    def whole(part: Part) -> Ended:
        print(f"==== {part.name}: {part.what}", flush=True)
        started = time.monotonic()
        with open(out / f"{part.name}.txt", "a") as log:
            result = run_part(part, where, log, processes)
        ended = Ended(part.name, result, time.monotonic() - started)
        print(f"==== {part.name}: {ended.result}, {ended.seconds:.0f} s", flush=True)
        return ended

    for alone, neighbours in itertools.groupby(parts, key=lambda part: part.alone):
        if alone:
            yield from map(whole, neighbours)
            continue
        together = list(neighbours)
        with ThreadPoolExecutor(max_workers=len(together)) as pool:
            try:
                for future in as_completed([pool.submit(whole, part) for part in together]):
                    yield future.result()
            except BaseException:  # Ctrl-C comes to this thread alone
                processes.end()
                raise


def run_part(part: Part, where: Mapping[str, str], log: TextIO, processes: Processes) -> str:
    """How it ended: the first of its commands that failed says so, and the others run all the same.

    What the commands write goes to `log`, and to the terminal if the part is alone.
    """
    if part.needs and not there(part.needs):
        return f"skipped: there is no {part.needs}"
    deadline, failures = time.monotonic() + part.limit_s, []
    for command in part.commands:
        words = filled(command, where)
        tell(log, f"$ {shlex.join(words)}\n", part.alone)
        try:
            with processes.started(words, dict(os.environ) | dict(part.environment), deadline) as process:
                failure = watch(process, deadline, log, part.alone)
        except OSError as error:
            failure = error.strerror or str(error)
        if failure:
            failures.append(f"{Path(words[0]).name} {' '.join(words[1:3])}: {failure}")
    return failures[0] if failures else "ok"


def there(needed: str) -> bool:
    kind, _, name = needed.rpartition(" ")
    return bool(importlib.util.find_spec(name) if kind == "module" else shutil.which(name))


def watch(process: subprocess.Popen[str], deadline: float, log: TextIO, aloud: bool) -> str:
    """Empty if it ended well before the deadline; all of its processes are ended there."""
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(deadline - time.monotonic(), end)
    timer.start()
    try:
        assert process.stdout, "a pipe"
        for line in process.stdout:
            tell(log, line, aloud)
        status = process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        return "took longer than the part may"
    return f"exit status {status}" if status else ""


def tell(log: TextIO, text: str, aloud: bool) -> None:
    if aloud:
        print(text, end="", flush=True)
    log.write(text)
    log.flush()
