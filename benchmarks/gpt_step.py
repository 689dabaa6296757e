"""Compare the training step of a small GPT under plain Inductor and under ssd_fx, step by step, in pairs.

python benchmarks/gpt_step.py --dir /mnt/nvme                       # the example's model
python benchmarks/gpt_step.py --dir /mnt/nvme --pairs 20 --neighbour   # beside a process that keeps one core busy

How it is measured:
- Two worker processes with equal weights, data and seeds take turns: one step here, one step there; which of them is
  first alternates from pair to pair. The two steps of a pair are neighbours, so both see the same machine. Two
  processes, because in one they would share a heap, and the pages that one model touched would be warm for the other.
- The step time is forward, backward and optimizer. The peak is that of forward and backward, in live CPU tensor bytes
  above the level before the step (memtrack.c: exact, all threads). Gradients are allocated by the warm-up and kept
  (`zero_grad(set_to_none=False)`), as the weights and AdamW's state are: all three lie below that level.
- ssd_fx's load buffers are mmap'ed and not seen by that count: they are reported beside it as staging.
- CPU time is that of the process, all its threads; the I/O threads' part of it is given too, from /proc/self/task.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the model is the example's

import peak  # noqa: E402 - a neighbour of this file
import torch  # noqa: E402 - with the lines around it
import train_gpt  # noqa: E402 - found through the path above
from system import MIB, io_cpu_s, machine  # noqa: E402 - a neighbour of this file

BACKENDS = ("inductor", "ssd_fx")
PAUSE_S = 0.05  # between turns: OpenMP's threads spin for some milliseconds after their last parallel region


@dataclass(frozen=True)
class Step:
    """One training step of one worker. Fields after `loss` are 0 where the backend has no such thing."""

    time_s: float
    cpu_s: float
    io_cpu_s: float | None  # None: no thread has the name
    peak_bytes: int
    loss: float
    staging_peak_bytes: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    forwarded_bytes: int = 0
    stall_s: float = 0.0
    disk_bytes: int = 0


def train(flags: argparse.Namespace) -> Iterator[Step]:
    """Endless steps of `flags.worker`."""
    torch.manual_seed(flags.seed)
    model = train_gpt.GPT(train_gpt.Shape(flags.layers, flags.width, flags.heads, flags.seq, flags.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    compiled = train_gpt.compile_model(model, flags.worker, flags.budget, flags.dir)
    names = {field.name for field in fields(Step)}
    for inputs, targets in train_gpt.batches(flags.batch, flags.seq, flags.seed):
        optimizer.zero_grad(set_to_none=False)
        if flags.worker == "ssd_fx":
            import ssd_fx

            ssd_fx.reset_stats()
        start, cpu, io_cpu = time.perf_counter(), time.process_time(), io_cpu_s()
        with peak.Peak() as memory:
            with torch.autocast("cpu", torch.bfloat16, enabled=flags.amp):
                loss = compiled(inputs, targets)
            loss.backward()
        optimizer.step()
        figures: dict[str, Any] = {"time_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
        io_end = io_cpu_s()
        figures |= {"io_cpu_s": None if io_end is None else io_end - (io_cpu or 0.0)}
        figures |= {"peak_bytes": memory.peak_bytes, "loss": loss.item()}
        del loss
        yield Step(**figures, **{name: value for name, value in train_gpt.stats().items() if name in names})


def work(flags: argparse.Namespace) -> None:
    """Make one step for every line on stdin, and answer it with one line of JSON on stdout."""
    os.environ.pop("LD_PRELOAD", None)  # compilers that are started from here need no tracker
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print must not mix with the answers
    for _, step in zip(sys.stdin, train(flags), strict=False):
        print(json.dumps(asdict(step)), file=answers)


class Worker:
    """A process that makes one step whenever it is asked to."""

    def __init__(self, backend: str, arguments: list[str]) -> None:
        self.backend = backend
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", backend, *arguments],
            env=os.environ | peak.environment(),
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
            raise SystemExit(f"the {self.backend} worker ended with {self._process.wait()}; its message is above")
        return Step(**json.loads(answer))

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


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(flags: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, float], list[dict[str, Step]]]:
    """Seconds of the first (compiling) step per backend, and the pairs."""
    workers = {}
    try:
        first = {}
        for backend in BACKENDS:
            workers[backend] = Worker(backend, arguments)
            first[backend] = workers[backend].step().time_s
            print(f"{backend}: first step (compiles) {first[backend]:.1f} s", file=sys.stderr, flush=True)
        pairs: list[dict[str, Step]] = []
        with busy_neighbour() if flags.neighbour else nullcontext():
            for number in range(flags.warmup + flags.pairs):
                pair = {}
                for backend in BACKENDS if number % 2 == 0 else reversed(BACKENDS):
                    time.sleep(PAUSE_S)
                    pair[backend] = workers[backend].step()
                pairs.append(pair)
        return first, pairs[flags.warmup :]
    finally:
        for worker in workers.values():
            worker.stop()


def system(flags: argparse.Namespace) -> dict[str, str]:
    """Where this was measured."""
    return machine(flags.dir) | {
        "model": f"{flags.layers} layers, width {flags.width}, {flags.heads} heads, dropout {flags.dropout}, "
        f"batch {flags.batch} x {flags.seq} bytes, {'bfloat16 autocast' if flags.amp else 'float32'}",
        "budget": flags.budget or "the backend's default",
        "neighbour": "one busy process" if flags.neighbour else "none",
    }


def median(steps: Iterable[Step], field: str) -> float:
    return float(statistics.median(getattr(step, field) for step in steps))


def table(pairs: list[dict[str, Step]]) -> list[tuple[str, str, str]]:
    """Rows of (what, inductor, ssd_fx); medians over the steps, except that peaks are the highest."""
    plain, offload = ([pair[backend] for pair in pairs] for backend in BACKENDS)

    def row(name: str, field: str, unit: str, scale: float = 1.0, both: bool = True) -> tuple[str, str, str]:
        left = f"{median(plain, field) * scale:.1f}" if both else "-"
        return f"{name}, {unit}", left, f"{median(offload, field) * scale:.1f}"

    def highest(name: str, *names: str) -> tuple[str, str, str]:
        left, right = (max(sum(getattr(s, n) for n in names) for s in steps) / MIB for steps in (plain, offload))
        return f"{name}, MiB", f"{left:.1f}", f"{right:.1f}"

    saved = median(offload, "saved_bytes")
    share = f"{100 * median(offload, 'offloaded_bytes') / saved:.0f}%" if saved else "-"
    ratios = [pair["ssd_fx"].time_s / pair["inductor"].time_s for pair in pairs]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    difference = max(abs(pair["ssd_fx"].loss - pair["inductor"].loss) for pair in pairs)
    io = [step.io_cpu_s for step in offload if step.io_cpu_s is not None]
    return [
        row("step time", "time_s", "ms", 1e3),
        ("  ratio of pairs: median (min to max)", "1", spread),
        row("CPU time", "cpu_s", "ms", 1e3),
        ("  of it I/O threads (10 ms ticks), ms", "-", f"{statistics.median(io) * 1e3:.1f}" if io else "unknown"),
        row("stall: the step waited for the disk", "stall_s", "ms", 1e3, both=False),
        highest("peak live tensors above the level before", "peak_bytes"),
        highest("peak staging (load buffers)", "staging_peak_bytes"),
        highest("both together at most", "peak_bytes", "staging_peak_bytes"),
        row("saved activations", "saved_bytes", "MiB", 1 / MIB, both=False),
        ("  offloaded", "-", share),
        row("written per step", "written_bytes", "MiB", 1 / MIB, both=False),
        row("read per step", "read_bytes", "MiB", 1 / MIB, both=False),
        row("forwarded per step (not read back)", "forwarded_bytes", "MiB", 1 / MIB, both=False),
        row("on disk", "disk_bytes", "MiB", 1 / MIB, both=False),
        ("last loss", f"{plain[-1].loss:.6f}", f"{offload[-1].loss:.6f}"),
        ("  losses of all pairs", "", f"differ by at most {difference:.1e}" if difference else "equal"),
    ]


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    train_gpt.add_flags(parser)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of steps, default %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="pairs before them, default %(default)s")
    parser.add_argument("--neighbour", action="store_true", help="keep one core busy with another process")
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = sys.argv[1:]
    flags = parse_flags(arguments)
    if flags.worker:
        return work(flags)
    where = system(flags)
    for name, text in where.items():
        print(f"{name:10} {text}", flush=True)
    first, pairs = measure(flags, arguments)
    rows = table(pairs)
    print(f"\nmedians of {len(pairs)} pairs; peaks are the highest of all steps\n{'':44}{'inductor':>12}  ssd_fx")
    for name, left, right in rows:
        print(f"{name:44}{left:>12}  {right}")
    if flags.json:
        steps = [{backend: asdict(step) for backend, step in pair.items()} for pair in pairs]
        result = {"system": where, "flags": vars(flags), "first_step_s": first, "table": rows, "pairs": steps}
        Path(flags.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
