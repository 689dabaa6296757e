"""On a GPU: how fast each engine moves device memory.

python benchmarks/gpu_bandwidth.py --dir /mnt/nvme         # prints a table, and writes <results>/<date>-<device>.json
python benchmarks/gpu_bandwidth.py --print FILE.json ...   # the tables of what was measured before

`--total` bytes in tensors of `--sizes` MiB, all started at once. The clock stops when the engine has finished all of
them. It is the second to fourth of four rounds, so that the file is there. What was read is compared. The CPU time is
that of the I/O threads. Engines that cannot serve here are listed with the reason. kvikio-forced needs a process of its
own, for cuFile is configured once: it is measured when it is the only one that is named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_machine import add_flags, prepare, results_path, system  # neighbours of this file
from system import MIB, io_cpu_s, write_json

from ssd_fx.options import Options
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.base import Engine, Memory
from ssd_fx.runtime.engines.registry import ENGINES, make_engine

ROUNDS = 4
ALONE = "kvikio-forced"


@dataclass(frozen=True)
class Bandwidth:
    """Rates in MB/s (10**6 B/s): the median of the rounds, and the slowest and the fastest.

    `cpu_s_per_gb`: of the I/O threads, waiting included; None for an engine that has none.
    """

    engine: str
    size_mib: int
    write: tuple[float, float, float]
    read: tuple[float, float, float]
    cpu_s_per_gb: float | None = None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(name: str, size: int, flags: argparse.Namespace) -> Bandwidth:
    """What is read is compared with what was written. Raises: SystemExit if it differs."""
    device = torch.device(flags.device)
    engine = make_engine(Options(dirs=(flags.dir,), engine=name, allow_tmpfs=flags.allow_tmpfs))
    try:
        sources = [torch.full((size,), i % 251, dtype=torch.uint8, device=device) for i in range(flags.total // size)]
        targets = [torch.zeros_like(source) for source in sources]
        one_round(engine, sources, targets, device)  # the file grows, and threads and streams are made
        before = io_cpu_s()
        rounds = [one_round(engine, sources, targets, device) for _ in range(ROUNDS - 1)]
        after = io_cpu_s()
    finally:
        engine.close()
    if not all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True)):
        raise SystemExit(f"engine {name} read other bytes than it wrote")
    moved = len(sources) * size
    columns = [sorted(moved / 1e6 / seconds for seconds in column) for column in zip(*rounds, strict=True)]
    write, read = ((statistics.median(r), r[0], r[-1]) for r in columns)
    cpu = None if before is None or after is None else (after - before) / (2 * len(rounds) * moved / 1e9)
    return Bandwidth(name, size // MIB, write, read, cpu)


def one_round(
    engine: Engine, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], device: torch.device
) -> tuple[float, float]:
    """Seconds to write all, and to read all."""
    extents = [engine.alloc(source.numel()) for source in sources]

    def run(make: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> float:
        synchronize(device)
        start = time.perf_counter()
        transfers = [make(extent, Memory.of(x)) for extent, x in zip(extents, tensors, strict=True)]
        for transfer in transfers:
            transfer.start()
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - start

    written, read = run(engine.write, sources), run(engine.read, targets)
    for extent in extents:
        engine.free(extent)
    return written, read


def available(flags: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Engines that serve on this device, with what is to be known of them, and the others with the reason."""
    names = flags.engines.split(",") if flags.engines else [name for name in ENGINES if name not in ("auto", ALONE)]
    serving, missing = {}, {}
    for name in names:
        try:
            engine = make_engine(Options(dirs=(flags.dir,), engine=name, allow_tmpfs=flags.allow_tmpfs))
        except (RuntimeError, OSError) as error:
            missing[name] = str(error)
            continue
        reach = engine.devices | {"cpu"}
        engine.close()
        if flags.device in reach:
            serving[name] = remark(name)
        else:
            missing[name] = f"reaches {', '.join(sorted(reach))} only"
    return serving, missing


def remark(name: str) -> str:
    if name.startswith("kvikio"):
        found = cufile.status(forced=name.endswith("-forced"))
        return f"{found.version}, " + ("real GPUDirect Storage" if found.real else f"through the host: {found.reason}")
    return "through pinned host memory" if name == "posix" else "host memory, no drive"


def table(result: Mapping[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = [f"# {result['system']['device']}, {result['date']}", "", "Written by benchmarks/gpu_bandwidth.py.", ""]
    lines += [f"- {name}: {text}" for name, text in result["system"].items()]
    lines += [f"- engine {name}: {text}" for name, text in result["serving"].items()]
    lines += [f"- engine {name}: not here: {text}" for name, text in result["missing"].items()]
    if result["bandwidth"]:
        lines += ["", "MB/s: median (slowest to fastest)", ""]
        lines += ["| engine | MiB | write | read | CPU s per GB |", "|---|---|---|---|---|"]
        lines += [row(each) for each in result["bandwidth"]]
    return "\n".join(lines) + "\n"


def row(found: Mapping[str, Any]) -> str:
    write, read = ("{:.0f} ({:.0f} to {:.0f})".format(*found[name]) for name in ("write", "read"))
    cpu = "-" if found["cpu_s_per_gb"] is None else f"{found['cpu_s_per_gb']:.2f}"
    return f"| {found['engine']} | {found['size_mib']} | {write} | {read} | {cpu} |"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    add = parser.add_argument
    add("--engines", help="comma-separated; default: all that serve on this machine")
    add("--sizes", type=int, nargs="+", default=[1, 8, 64], metavar="MIB", help="of a tensor, default %(default)s")
    add("--total", type=int, default=512 * MIB, help="bytes per round, default %(default)s")
    flags = parser.parse_args(arguments)
    if flags.print:
        return flags
    names = flags.engines.split(",") if flags.engines else []
    if ALONE in names and len(names) > 1:
        parser.error(f"{ALONE} needs a process of its own: --engines {ALONE}")
    prepare(parser, flags)
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parsed(arguments)
    if flags.print:
        print(*(table(json.loads(Path(path).read_text())) for path in flags.print), sep="\n", end="")
        return
    serving, missing = available(flags)
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "system": system(flags)}
    result |= {"serving": serving, "missing": missing, "flags": vars(flags), "bandwidth": []}
    path = results_path(flags, result["date"], result["system"]["device"], flags.name)
    sizes = [size * MIB for size in flags.sizes if size * MIB <= flags.total]
    for name in serving:
        result["bandwidth"] += [asdict(bandwidth(name, size, flags)) for size in sizes]
        write_json(f"{path}.json", result)  # what was measured is kept if a later engine takes too long
    if not serving:
        raise SystemExit(
            "\n".join(["no engine serves here, so nothing was measured:", *map(": ".join, missing.items())])
        )
    print(table(result), end="")


if __name__ == "__main__":
    main()
