"""All that is to be seen on a GPU, in parts of a few minutes: `make gpu`, or one of them: `make gpu-calibrate`.

python benchmarks/gpu_parts.py --dir DIR --out OUT                  # all
python benchmarks/gpu_parts.py --dir DIR --out OUT info bandwidth   # these
python benchmarks/gpu_parts.py --dir DIR --out OUT tests            # all tests, at once
python benchmarks/gpu_parts.py --dry-run                            # what would be run, and how long it may take

Every part is a row of processes of its own, has less than five minutes, and stops no other part when it fails. Tests
run at once, and what is timed runs alone. The output goes to OUT/PART.txt too, and how a part ended to
OUT/summary.json, at once; the last thing printed is a table of it. The exit status is 1 if a part failed. The parts
follow the order in which one would want to know.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
BENCH = "{python} benchmarks/gpu.py --dir {dir} --results {out} --no-md"
WAYS = "{python} benchmarks/gpu_ways.py --dir {dir} --results {out} --warmup 5 --profile --seconds 120"
TESTS = "{python} -m pytest -m gpu -q"
AT_ONCE = "-v --tb=short --maxfail=5"  # the reasons are printed before the part's time is over


@dataclass(frozen=True)
class Part:
    """`commands` run one after the other, together for at most `limit_s`; with {python}, {dir} and {out} filled in.

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


PARTS = (
    Part(
        "info",
        "the machine, the package, what small things cost",
        60,
        (
            "nvidia-smi",
            "df -hT {dir}",
            "{python} -m ssd_fx info",
            "{python} benchmarks/gpu_costs.py",
        ),
    ),
    Part(
        "roundtrips",
        "the ops on CUDA tensors, bitwise: engines memory and posix, and torch's streams",
        120,
        (TESTS + " tests/gpu/test_gpu_roundtrip.py",),
        alone=False,
        environment={"GPU_ENGINES": "memory,posix"},
    ),
    Part(
        "accelerator",
        "the tests of streams that run on fake devices elsewhere, and training steps in eager mode",
        150,
        ("{python} -m pytest -q tests/runtime/test_runtime_streams.py tests/accelerator",),
        alone=False,
    ),
    Part(
        "sanitizer",
        "one round trip of posix under compute-sanitizer",
        120,
        (
            "compute-sanitizer --error-exitcode 9 "
            + TESTS
            + " tests/gpu/test_gpu_roundtrip.py -k 'test_round_trip and dtype1 and 999'",
        ),
        alone=False,
        needs="compute-sanitizer",
        environment={"GPU_ENGINES": "posix"},
    ),
    Part(
        "training",
        "a small GPT: gradients bitwise those of engine memory, near plain Inductor's, and the peak",
        200,
        (TESTS + " tests/gpu/test_gpu_training.py",),
        alone=False,
        environment={"GPU_ENGINES": "memory,posix"},
    ),
    Part(
        "ranks",
        "DistributedDataParallel on two processes of one GPU: gradients bitwise those of engine memory",
        200,
        (TESTS + " tests/gpu/test_gpu_ranks.py",),
        alone=False,
    ),
    Part(
        "models",
        "other people's models, through every way that a tensor may take",
        200,
        (f"{{python}} -m pytest -m gpu {AT_ONCE} -n {{workers}} tests/gpu/test_gpu_models.py",),
        alone=False,
        needs="module transformers",
        environment={"GPU_ENGINES": "memory,posix,kvikio-forced"},
    ),
    Part(
        "calibrate",
        "the rates that plans are made for; to be compared with the card's data sheet",
        40,
        ("{python} -m ssd_fx calibrate {dir}", "cp {cache}/ssd_fx/machine.json {out}/machine.json"),
    ),
    Part(
        "bandwidth",
        "engines memory and posix with 1, 8 and 64 MiB, and the CPU time of the I/O threads",
        60,
        (BENCH + " --name bandwidth --bandwidth-only --engines memory,posix",),
    ),
    Part(
        "ways-wide",
        "2 wide layers, whose steps are long enough for host memory, beside plain Inductor and recomputing",
        150,
        (
            f"{WAYS} --name wide --layers 2 --width 12288 --heads 96 --batch 12 --optimizer sgd "
            "--ways memory:auto memory:0 recompute:0.5",
        ),
    ),
    Part(
        "ways-gpt",
        "12 layers: host memory, the drive, both, and recomputing",
        150,
        (f"{WAYS} --name gpt --ways memory:0 posix:auto posix:auto:32GiB recompute:0.5",),
    ),
    Part("ways-drive", "4 layers, nothing stays", 150, (f"{WAYS} --name drive --layers 4 --ways posix:0",)),
    Part(
        "runtime",
        "the runtime's tests, as they are on a machine with a GPU",
        200,
        (f"{{python}} -m pytest {AT_ONCE} -n 4 tests/runtime",),
    ),
    Part(
        "kvikio",
        "real GPUDirect Storage: round trips and bandwidth",
        240,
        (
            TESTS + " tests/gpu/test_gpu_roundtrip.py -k kvikio",
            BENCH + " --name kvikio --bandwidth-only --engines kvikio --sizes 1 8 64",
        ),
        needs="module kvikio",
        environment={"GPU_ENGINES": "kvikio"},
    ),
    Part(
        "kvikio-forced",
        "kvikio's compatibility mode, which checks the calls only",
        180,
        (
            TESTS + " tests/gpu/test_gpu_roundtrip.py -k kvikio",
            BENCH + " --name kvikio-forced --bandwidth-only --engines kvikio-forced --sizes 64",
        ),
        needs="module kvikio",
        environment={"GPU_ENGINES": "kvikio-forced"},
    ),
)


def filled(command: str, where: Mapping[str, str]) -> list[str]:
    """The command's words. What is filled in is one word, whatever it is made of."""
    return [word.format(**where) for word in shlex.split(command)]


def run(parts: Sequence[Part], where: Mapping[str, str], out: Path) -> Iterator[Ended]:
    """All parts, whatever becomes of them, as they end. Neighbours that may run at once do."""

    def whole(part: Part) -> Ended:
        print(f"==== {part.name}: {part.what}", flush=True)
        started = time.monotonic()
        with open(out / f"{part.name}.txt", "a") as log:
            result = run_part(part, where, log)
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
                end_running()
                raise


def run_part(part: Part, where: Mapping[str, str], log: TextIO) -> str:
    """How it ended: the first of its commands that failed says so, and the others run all the same.

    What the commands write goes to `log`, and to the terminal if the part is alone.
    """
    if part.needs and not there(part.needs):
        return f"skipped: there is no {part.needs}"
    deadline, failures = time.monotonic() + part.limit_s, []
    for command in part.commands:
        words = filled(command, where)
        tell(log, f"$ {shlex.join(words)}\n", part.alone)
        failure = run_command(words, dict(os.environ) | dict(part.environment), deadline, log, part.alone)
        if failure:
            failures.append(f"{Path(words[0]).name} {' '.join(words[1:3])}: {failure}")
    return failures[0] if failures else "ok"


def there(needed: str) -> bool:
    kind, _, name = needed.rpartition(" ")
    return bool(importlib.util.find_spec(name) if kind == "module" else shutil.which(name))


def run_command(words: Sequence[str], environment: Mapping[str, str], deadline: float, log: TextIO, aloud: bool) -> str:
    """Empty if it ended well before the deadline; all of its processes are ended there."""
    left = deadline - time.monotonic()
    if left <= 0:
        return "no time was left for it"
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return error.strerror or str(error)
    _running.add(process)
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(left, end)
    timer.start()
    try:
        assert process.stdout, "a pipe"
        for line in process.stdout:
            tell(log, line, aloud)
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        timer.cancel()
        _running.discard(process)
    if late.is_set():
        return "took longer than the part may"
    return f"exit status {status}" if status else ""


_running: set[subprocess.Popen[str]] = set()


def end_running() -> None:
    """Ends all commands that run, with their processes."""
    for process in list(_running):
        os.killpg(process.pid, signal.SIGKILL)


def tell(log: TextIO, text: str, aloud: bool) -> None:
    if aloud:
        print(text, end="", flush=True)
    log.write(text)
    log.flush()


def table(ended: Sequence[Ended]) -> str:
    return "\n".join(["", f"{'part':16}{'s':>6}  result", *(f"{e.name:16}{e.seconds:6.0f}  {e.result}" for e in ended)])


def keep(path: Path, ended: Sequence[Ended]) -> None:
    """Adds the parts to those that an earlier run left there."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {e.name: asdict(e) for e in ended}, indent=1) + "\n")


def chosen(names: Sequence[str]) -> list[Part]:
    """Parts by name, in the order of PARTS; all without names. "ways" are all whose name begins so, "tests" those that
    run at once.

    Raises: SystemExit for a name that is none.
    """
    unknown = [name for name in names if not any(named(part, name) for part in PARTS)]
    if unknown:
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or any(named(part, name) for name in names)]


def named(part: Part, name: str) -> bool:
    if name == "tests":
        return not part.alone
    return part.name == name or (name == "ways" and part.name.startswith("ways-"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", help=f"of {', '.join(part.name for part in PARTS)}; ways, tests: all of these"
    )
    parser.add_argument("--dir", default="demo-out/gpu", help="directory on the drive, default %(default)s")
    parser.add_argument("--out", default="demo-out/gpu-results", help="where results go, default %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    flags = parser.parse_args(arguments)
    parts = chosen(flags.parts)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    where = {"python": sys.executable, "dir": os.path.abspath(flags.dir), "out": os.path.abspath(flags.out)}
    where |= {"cache": cache, "workers": str(max(1, len(os.sched_getaffinity(0)) - 4))}
    if flags.dry_run:
        for part in parts:
            print(f"{part.name}, at most {part.limit_s} s: {part.what}")
            print(*(f"    {shlex.join(filled(command, where))}" for command in part.commands), sep="\n")
        at_once = max((part.limit_s for part in parts if not part.alone), default=0)
        print(f"in all at most {at_once + sum(part.limit_s for part in parts if part.alone)} s")
        return 0
    import torch  # not before: a dry run needs none

    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: torch sees no CUDA device, so nothing was run")
    for path in (where["dir"], where["out"]):
        os.makedirs(path, exist_ok=True)
    out, ended = Path(where["out"]), []
    for each in run(parts, where, out):
        ended.append(each)
        keep(out / "summary.json", ended)
    print(table(ended))
    return int(any(each.failed for each in ended))


if __name__ == "__main__":
    sys.exit(main())
