"""What the checksums cost: throughput and CPU time of the engine "posix" with and without them, in alternation.

    python benchmarks/checksum_cost.py --dir DIRECTORY [--mib 8 64] [--total-mib 512] [--repeats 7]

CPU seconds are those of this process, its I/O threads included, per 10^9 bytes; medians, with the extremes.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ssd_fx.runtime.engines.base import Completion, Extent, Memory
from ssd_fx.runtime.engines.posix import PosixEngine
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR


def measured(transfers: list[Completion], nbytes: int) -> tuple[float, float]:
    """Runs them all: (GB/s, CPU-s/GB)."""
    wall, cpu = time.perf_counter(), time.process_time()
    for transfer in transfers:
        transfer.start()
    for transfer in transfers:
        transfer.wait()
    return nbytes / 1e9 / (time.perf_counter() - wall), (time.process_time() - cpu) / (nbytes / 1e9)


def trial(engine: PosixEngine, tensors: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Writes all tensors, then reads them back into themselves."""
    nbytes = sum(x.nbytes for x in tensors)
    extents = [engine.alloc(x.nbytes) for x in tensors]

    def run(start: Callable[[Extent, Memory], Completion]) -> tuple[float, float]:
        return measured([start(extent, Memory.of(x)) for extent, x in zip(extents, tensors, strict=True)], nbytes)

    found = {"write": run(engine.write), "read": run(engine.read)}
    for extent in extents:
        engine.free(extent)
    return found


def summary(values: list[float]) -> str:
    return f"{statistics.median(values):6.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    CPU_ALLOCATOR.install()  # as in a training step: nothing bounces
    for mib in options.mib:
        tensors = [torch.randn(mib << 18) for _ in range(options.total_mib // mib)]
        engines = {on: PosixEngine(options.dir, checksums=on) for on in (False, True)}
        results: dict[tuple[bool, str], list[tuple[float, float]]] = {}
        for repeat in range(-1, options.repeats):  # the first one writes fresh extents and is not counted
            for on in (False, True) if repeat % 2 else (True, False):
                for operation, found in trial(engines[on], tensors).items():
                    results.setdefault((on, operation), []).extend([found] * (repeat >= 0))
        for (on, operation), values in sorted(results.items(), key=lambda item: (item[0][1], item[0][0])):
            rate, cpu = (summary(list(column)) for column in zip(*values, strict=True))
            print(f"{mib:3} MiB {operation:5} checksums {'on ' if on else 'off'}  {rate} GB/s  {cpu} CPU-s/GB")
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
