"""Compare the runtime's sequential writes and reads with fio's, on the same directory, in turns.

python benchmarks/io_roundtrip.py --dir /mnt/nvme
python benchmarks/io_roundtrip.py --dir /mnt/nvme --total 4096 --rounds 9 --json roundtrip.json

How it is measured:
- Ours are the ops of a training step: `store` and its release for `--total` bytes of tensors, until the last byte is
  written; then `load` (as far ahead as the option `prefetch` allows) and its wait for all of them. The tensors are
  written from memory that is used again and again, as the allocator's warm heap is in a step. One round before the
  measured ones brings the file and the memory of loads into the state of every training step but the first.
- fio overwrites and reads a file of the same total that was written before, with direct I/O, requests of the size of
  ours (a tensor, at most a piece of 8 MiB) and two of them at a time: once with two threads of psync, once with libaio
  at depth 2. Its own clock is used, which leaves its start out. The better of the two is the mark.
- The same without checksums is there to tell what the checksums cost.
- In every round ours and both of fio's take turns; which is first alternates. The ratio is ours to the mark, by the
  medians over the rounds; in brackets the lowest and highest ratio of one round.
- CPU seconds per GB (10^9 B) are user + system time of the process with all its threads; of fio its own figures. What
  the kernel does on behalf of both in its own threads is in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from system import MIB, announce, write_json

from ssd_fx.report.rows import aligned
from ssd_fx.runtime import ops  # noqa: F401  registers the operators
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.stores import close_stores

SIZES_MIB = (1, 8, 64)
PIECE = 8 * MIB  # the largest request that the pool makes
FIO = {
    "fio psync": ["--ioengine=psync", "--iodepth=1", "--numjobs=2", "--offset_increment=50%", "--size=50%"],
    "fio libaio": ["--ioengine=libaio", "--iodepth=2", "--numjobs=1"],
}
OURS, UNCHECKED = "ssd_fx", "ssd_fx, no checksums"
CPU = torch.device("cpu")
op = torch.ops.ssd_fx


@dataclass(frozen=True)
class Sample:
    """One timed transfer of `nbytes`."""

    nbytes: int
    seconds: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """10^9 bytes per second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_s / (self.nbytes / 1e9)


Samples = dict[tuple[int, str, str], list[Sample]]  # (bytes of a tensor, "write" or "read", who)


@contextlib.contextmanager
def timed(nbytes: int, into: list[Sample]) -> Iterator[None]:
    started, cpu = time.perf_counter(), time.process_time()
    yield
    into.append(Sample(nbytes, time.perf_counter() - started, time.process_time() - cpu))


class Ours:
    """The ops on tensors of `nbytes`, `total` bytes in all."""

    def __init__(self, flags: argparse.Namespace, nbytes: int, *, checksums: bool = True) -> None:
        self._config = json.dumps(
            {
                "dirs": [flags.dir],
                "engine": flags.engine,
                "adapt": False,
                "inflight": flags.inflight * MIB,
                "checksums": checksums,
            }
        )
        self._count = flags.total * MIB // nbytes
        self._ahead = max(1, flags.prefetch * MIB // nbytes)
        several = min(self._count, 2 * flags.inflight * MIB // nbytes)
        self._sources = [torch.rand(nbytes // 4) for _ in range(several)]
        self._nbytes = nbytes
        self._handles: list[torch.Tensor] = []

    def write(self) -> None:
        for i in range(self._count):
            x = self._sources[i % len(self._sources)]
            handle = op.store(x, self._config, "roundtrip", i, 2 * i)
            op.wait_store_(handle, x, 2 * i + 1, True)
            self._handles.append(handle)
        for handle in self._handles:
            entry = lookup(handle)
            if entry.write:
                entry.write.wait()

    def read(self) -> None:
        loading: deque[torch.Tensor] = deque()
        for i in range(self._count):
            while len(loading) < min(self._ahead, self._count - i):
                loading.append(self._load(self._handles[i + len(loading)], 2 * i))
            op.wait_load_(loading.popleft(), self._handles[i], 2 * i + 1)
            self._handles[i] = torch.empty(0)  # the handle dies and its extent goes back
        self._handles.clear()

    def check(self) -> None:
        """What is read is what was written.

        Raises: SystemExit if it is not.
        """
        self.write()
        for i, handle in enumerate(self._handles):
            y = self._load(handle, 2 * i)
            op.wait_load_(y, handle, 2 * i + 1)
            if not torch.equal(y, self._sources[i % len(self._sources)]):
                raise SystemExit(f"tensor {i} came back with other bytes than were stored: these figures mean nothing")
        self._handles.clear()

    def _load(self, handle: torch.Tensor, seq: int) -> torch.Tensor:
        x = self._sources[0]
        y: torch.Tensor = op.load(handle, x.shape, x.stride(), x.dtype, CPU, seq)
        return y


def fio(file: Path, engine: str, what: str, total: int, request: int) -> Sample:
    """One run of fio over all of `file`.

    Raises: SystemExit with fio's message if it fails.
    """
    command = ["fio", "--name=mark", f"--filename={file}", f"--rw={what}", f"--bs={request}", f"--size={total}"]
    command += ["--direct=1", "--thread", "--group_reporting", "--output-format=json", "--allow_file_create=0"]
    done = subprocess.run(command + FIO[engine], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    moved = job[what]
    busy_s = job["job_runtime"] / 1e3  # of all its threads; the percentages are shares of this
    cpu_s = busy_s * (job["usr_cpu"] + job["sys_cpu"]) / 100
    return Sample(moved["io_bytes"], moved["runtime"] / 1e3, cpu_s)


def prepare_file(path: Path, total: int) -> None:
    """Writes the file once: overwriting is what our extents see too."""
    block = os.urandom(8 * MIB)
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, total)
        for _ in range(0, total, len(block)):
            file.write(block)
        os.fsync(file.fileno())


def measure(flags: argparse.Namespace, nbytes: int, file: Path | None, samples: Samples) -> None:
    """All rounds at one size of tensors."""
    total = flags.total * MIB
    ours = {OURS: Ours(flags, nbytes), UNCHECKED: Ours(flags, nbytes, checksums=False)}
    turns = [*ours, *(FIO if file else ())]

    def take(who: str, what: str) -> None:
        into = samples[nbytes, what, who]
        if who in ours:
            with timed(total, into):
                ours[who].write() if what == "write" else ours[who].read()
        else:
            assert file is not None
            into.append(fio(file, who, what, total, min(nbytes, PIECE)))

    for number in range(-1, flags.rounds):
        in_turn = turns if number % 2 else turns[::-1]
        for what, who in itertools.product(("write", "read"), in_turn):
            take(who, what)
        if number < 0:  # the round that warms up
            for key in samples:
                if key[0] == nbytes:
                    samples[key].clear()
    for each in ours.values():
        each.check()
    close_stores()


def table(samples: Samples) -> list[dict[str, str]]:
    """One row per size and direction; medians over the rounds."""
    rows = []
    for nbytes, what, who in samples:
        if who != OURS:
            continue
        rates = {w: [s.rate for s in samples[n, d, w]] for n, d, w in samples if (n, d) == (nbytes, what)}
        medians = {w: statistics.median(r) for w, r in rates.items()}
        cpu = {w: statistics.median(s.cpu_per_gb for s in samples[nbytes, what, w]) for w in medians}
        row = {"tensors": f"{nbytes // MIB} MiB", "": what}
        row |= {w: f"{medians[w]:.2f} GB/s, {cpu[w]:.3f} CPU-s/GB" for w in medians}
        marks = [w for w in medians if w in FIO]
        if marks:
            mark = max(marks, key=medians.__getitem__)
            pairs = [a / b for a, b in zip(rates[OURS], rates[mark], strict=True)]
            spread = f"({min(pairs):.2f} to {max(pairs):.2f})"
            row["ours / the better fio"] = f"{medians[OURS] / medians[mark]:.2f} {spread}"
        rows.append(row)
    return rows


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the files go, default %(default)s")
    parser.add_argument("--total", type=int, default=1024, help="MiB per transfer, default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, default %(default)s")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MIB, help="MiB per tensor, default 1 8 64")
    parser.add_argument("--inflight", type=int, default=128, help="MiB being written at most, default %(default)s")
    parser.add_argument("--prefetch", type=int, default=64, help="MiB being loaded at most, default %(default)s")
    parser.add_argument("--engine", default="posix", help="default %(default)s")
    parser.add_argument("--json", help="write system, table and all samples there")
    flags = parser.parse_args()
    flags.dir = os.path.abspath(flags.dir)
    if any(flags.total % size for size in flags.sizes):
        parser.error("--total must be a multiple of every size")
    return flags


def main() -> None:
    flags = parse_flags()
    CPU_ALLOCATOR.install()  # as in a training step: nothing bounces
    where = announce(flags.dir, fio=fio_version())
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="io_roundtrip-", dir=flags.dir) as scratch:
        file = Path(scratch) / "fio" if shutil.which("fio") else None
        if file:
            prepare_file(file, flags.total * MIB)
        for size in flags.sizes:
            measure(flags, size * MIB, file, samples)
            print(f"{size} MiB: measured", file=sys.stderr, flush=True)
    rows = table(samples)
    print(f"\n{flags.total} MiB per transfer, medians of {flags.rounds} rounds")
    print(*aligned([tuple(rows[0]), *(tuple(row.values()) for row in rows)]), sep="\n")
    if file is None:
        print("fio is not installed: no mark, and no ratio. Install it (apt install fio) to compare.")
    if flags.json:
        seen = [
            {"nbytes": nbytes, "what": what, "who": who, "samples": [asdict(sample) for sample in found]}
            for (nbytes, what, who), found in samples.items()
        ]
        result = {"system": where, "flags": vars(flags), "table": rows, "samples": seen}
        write_json(flags.json, result)


def fio_version() -> str:
    if not shutil.which("fio"):
        return "not installed"
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
