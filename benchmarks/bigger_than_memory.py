"""Train a GPT whose saved activations are several times the memory that the process may have.

python benchmarks/bigger_than_memory.py --dir /mnt/nvme
python benchmarks/bigger_than_memory.py --dir /mnt/nvme --limit 3GiB --batch 64

How it is measured: every run is a process of its own, with equal weights, data and seeds. The limit is RLIMIT_DATA,
which Linux holds against all private writable memory of the process, anonymous mappings included; a process needs no
privilege to set it on itself, and it is there before torch is imported, so that compiling is under it too. Files on the
drive are read and written past the page cache, which would not count. First plain Inductor without a limit, for the
losses that are right; then plain Inductor under the limit, which must fail for want of memory; then ssd_fx under it.
The exit status is 0 only if the first fails, the second ends with the right losses, and the activations that it saved
are at least `--times` the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
FIGURES = ("step_s", "data_bytes", "resident_bytes", "saved_bytes", "written_bytes")  # of the last step
FAILURES = ("can't allocate memory", "Cannot allocate memory", "MemoryError", "std::bad_alloc")
ONE_PROCESS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # compilers that are started have limits of their own
CLOSE = 1e-4  # of a loss: Inductor's kernels are cut elsewhere, and embedding gradients are added up with atomics


@dataclass(frozen=True)
class Run:
    """How one process ended. `losses` of the steps that it made; `saved_bytes` of one of them."""

    status: int
    losses: tuple[float, ...]
    step_s: float
    data_bytes: int
    resident_bytes: int
    saved_bytes: int
    written_bytes: int
    message: str

    @staticmethod
    def of(status: int, printed: str, errors: str) -> Run:
        """Read what `train` printed, a line of JSON for every step, and its last words."""
        steps = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        last = steps[-1] if steps else {}
        figures = {name: last.get(name, 0) for name in FIGURES}
        return Run(status, tuple(step["loss"] for step in steps), **figures, message=_last_words(errors))

    def wants_memory(self) -> bool:
        return self.status != 0 and any(failure in self.message for failure in FAILURES)

    def apart(self, right: Run) -> float:
        """The largest difference of two losses of the same step, relative; infinite if one run made fewer steps, or if
        a loss is no number."""
        if len(self.losses) != len(right.losses) or not all(map(math.isfinite, self.losses)):
            return math.inf
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, right.losses, strict=True))


def _last_words(errors: str) -> str:
    """The line of a traceback that says what went wrong."""
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in said if any(failure in line for failure in FAILURES)]
    return (named or said or [""])[-1]


def train(flags: argparse.Namespace) -> None:
    """One line of JSON for every step; in a process of its own."""
    if flags.limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (flags.limit_bytes, flags.limit_bytes))
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    import train_gpt

    torch.manual_seed(flags.seed)
    model = train_gpt.GPT(train_gpt.Shape(flags.layers, flags.width, flags.heads, flags.seq, flags.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    compiled = train_gpt.compile_model(model, flags.backend, flags.budget, flags.dir)
    data = train_gpt.batches(flags.batch, flags.seq, flags.seed)
    for step in range(flags.steps):
        start, before = time.perf_counter(), train_gpt.stats()
        loss = compiled(*next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after, memory = train_gpt.stats(), train_gpt.resident_bytes
        figures = {"step": step, "loss": loss.item(), "step_s": time.perf_counter() - start}
        figures |= {"data_bytes": memory("VmData"), "resident_bytes": memory("VmHWM")}
        figures |= {name: after.get(name, 0) - before.get(name, 0) for name in ("saved_bytes", "written_bytes")}
        print(json.dumps(figures), flush=True)


def run(flags: argparse.Namespace, backend: str, limit: int) -> Run:
    """`limit` in bytes, 0 for none."""
    own = [sys.executable, __file__, *flags.given, "--backend", backend, "--limit-bytes", str(limit)]
    ended = subprocess.run(own, capture_output=True, text=True, env=os.environ | ONE_PROCESS)
    return Run.of(ended.returncode, ended.stdout, ended.stderr)


def report(flags: argparse.Namespace, limit: int, right: Run, plain: Run, ours: Run) -> Iterator[str]:
    def row(name: str, found: Run) -> str:
        ended = f"{len(found.losses)} steps" if found.status == 0 else f"fails: {found.message[-110:]}"
        memory = f"data {_size(found.data_bytes)}, highest resident {_size(found.resident_bytes)}"
        return f"{name:34} {ended}" + (f"; {found.step_s:.1f} s the last one, {memory}" if found.losses else "")

    yield row("inductor, no limit", right)
    yield row(f"inductor, limit {_size(limit)}", plain)
    yield row(f"ssd_fx, limit {_size(limit)}", ours)
    yield f"{'saved activations of a step':34} {_size(ours.saved_bytes)}, {ours.saved_bytes / limit:.2f} x the limit"
    yield f"{'  written to the drive':34} {_size(ours.written_bytes)}"
    for name, found in (("inductor", right), ("ssd_fx", ours)):
        yield f"{'losses, ' + name:34} {' '.join(f'{loss:.6f}' for loss in found.losses)}"
    yield f"{'  largest relative difference':34} {ours.apart(right):.2g}"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def faults(limit: int, times: float, right: Run, plain: Run, ours: Run) -> list[str]:
    """What of the claim does not hold."""
    checks = {
        f"plain Inductor without a limit fails: {right.message}": right.status != 0,
        f"plain Inductor does not want memory: {plain.message or 'it ended well'}": not plain.wants_memory(),
        f"ssd_fx fails: {ours.message}": ours.status != 0,
        f"losses are apart: {ours.losses} and {right.losses}": not ours.apart(right) < CLOSE,
        f"what is saved is only {ours.saved_bytes / limit:.2f} x the limit": ours.saved_bytes < times * limit,
    }
    return [fault for fault, found in checks.items() if found]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", required=True, help="directory on the drive")
    add("--limit", default="1.5GiB", help="of the process's data, default %(default)s")
    add("--times", type=float, default=3.0, help="what is saved is at least so many limits, default %(default)s")
    add("--steps", type=int, default=3, help="default %(default)s")
    for name, default in {"layers": 32, "width": 192, "heads": 3, "batch": 32, "seq": 512, "seed": 0}.items():
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    add("--dropout", type=float, default=0.0, help="default %(default)s")
    add("--lr", type=float, default=1e-3, help="default %(default)s")
    add("--budget", default="0", help="as ssd_fx has it, default %(default)s")
    add("--json", metavar="OUT", help="write the figures to this file")
    add("--backend", help=argparse.SUPPRESS)
    add("--limit-bytes", type=int, default=0, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    flags.given = list(arguments)
    return flags


def main() -> int:
    flags = parse(sys.argv[1:])
    if flags.backend:
        train(flags)
        return 0
    from system import announce, write_json  # neighbours of this file

    from ssd_fx.sizes import parse_bytes

    limit = parse_bytes("--limit", flags.limit)
    announce(flags.dir, width=34)
    right, plain, ours = run(flags, "inductor", 0), run(flags, "inductor", limit), run(flags, "ssd_fx", limit)
    print("\n".join(report(flags, limit, right, plain, ours)))
    if flags.json:
        ways = {"inductor": right, "inductor limited": plain, "ssd_fx limited": ours}
        found = {"limit_bytes": limit} | {way: asdict(each) for way, each in ways.items()}
        write_json(flags.json, found)
    wrong = faults(limit, flags.times, right, plain, ours)
    print("\n".join(wrong) or f"ssd_fx trains what saves more than {flags.times:g} times the memory that it may have")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
