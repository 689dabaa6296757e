"""On a GPU: how fast each engine moves device memory, and what offloading does to the training step of a GPT.

python benchmarks/gpu.py --dir /mnt/nvme   # prints two tables and writes benchmarks/results/<date>-<device>.json, .md

How it is measured:
- Bandwidth: `--total` bytes in tensors of 1, 8 and 64 MiB, all started at once, clock stopped when the engine has
  finished all of them; the second to fourth of four rounds, so that the file is there; what was read is compared.
- Step: plain Inductor and ssd_fx take turns in one process, with equal weights, data and seeds; which of them is first
  alternates. A step is forward, backward and optimizer, between two synchronisations. The peak is that of forward and
  backward above the level before them, as torch's allocator counts; gradients lie below that level.
- Engines that cannot serve here are listed with the reason. Without a GPU nothing is run and nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))  # the model is the example's

import torch  # noqa: E402 - behind the path
import train_gpt  # noqa: E402 - found through the path above
from moved import Moved  # noqa: E402 - a neighbour of this file

import ssd_fx  # noqa: E402
from ssd_fx.runtime import cufile  # noqa: E402
from ssd_fx.runtime.config import RuntimeConfig  # noqa: E402
from ssd_fx.runtime.engines import ENGINES, Engine, Memory, make_engine  # noqa: E402

MIB = 2**20
SIZES = (1 * MIB, 8 * MIB, 64 * MIB)
ROUNDS = 4


@dataclass(frozen=True)
class Bandwidth:
    """Rates in MB/s (10**6 B/s): the median of the rounds, and the slowest and the fastest."""

    engine: str
    size_mib: int
    write: tuple[float, float, float]
    read: tuple[float, float, float]


@dataclass(frozen=True)
class Step(Moved):
    time_s: float
    peak_bytes: int
    loss: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def available(flags: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Engines that serve on this device, with what is to be known of them, and the others with the reason."""
    names = flags.engines.split(",") if flags.engines else [name for name in ENGINES if name != "auto"]
    serving, missing = {}, {}
    for name in names:
        try:
            engine = make_engine(RuntimeConfig(dirs=(flags.dir,), engine=name, allow_tmpfs=flags.allow_tmpfs))
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
    driver, forced = name.removesuffix("-forced"), name.endswith("-forced")
    if driver in cufile.DRIVERS:
        found = cufile.status(cufile.driver(driver), forced)
        return f"{found.version}, " + ("real GPUDirect Storage" if found.real else f"through the host: {found.reason}")
    return "through pinned host memory" if name == "posix" else "host memory, no drive"


def bandwidth(name: str, size: int, flags: argparse.Namespace) -> Bandwidth:
    device = torch.device(flags.device)
    engine = make_engine(RuntimeConfig(dirs=(flags.dir,), engine=name, allow_tmpfs=flags.allow_tmpfs))
    try:
        sources = [torch.full((size,), i % 251, dtype=torch.uint8, device=device) for i in range(flags.total // size)]
        targets = [torch.zeros_like(source) for source in sources]
        rounds = [one_round(engine, sources, targets, device) for _ in range(ROUNDS)][1:]
    finally:
        engine.close()
    if not all(torch.equal(a, b) for a, b in zip(sources, targets, strict=True)):
        raise SystemExit(f"engine {name} read other bytes than it wrote")
    mb = len(sources) * size / 1e6
    rates = [sorted(mb / seconds for seconds in column) for column in zip(*rounds, strict=True)]
    write, read = ((statistics.median(r), r[0], r[-1]) for r in rates)
    return Bandwidth(name, size // MIB, write, read)


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


class Training:
    """A model of its own under one backend; `step` makes one step. `engine` None: plain Inductor."""

    def __init__(self, flags: argparse.Namespace, engine: str | None) -> None:
        self.device, self.amp, self.ours = torch.device(flags.device), flags.amp, engine is not None
        torch.manual_seed(flags.seed)
        shape = train_gpt.Shape(flags.layers, flags.width, flags.heads, flags.seq, flags.dropout)
        self.model = train_gpt.GPT(shape).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=flags.lr)
        self.batches = train_gpt.batches(flags.batch, flags.seq, flags.seed)
        options = {"dirs": [flags.dir], "engine": engine, "budget": flags.budget, "allow_tmpfs": flags.allow_tmpfs}
        if engine is None:
            self.compiled = torch.compile(self.model)
        else:
            self.compiled = torch.compile(self.model, backend=ssd_fx.backend, options=options)

    def step(self) -> Step:
        inputs, targets = (x.to(self.device) for x in next(self.batches))
        self.optimizer.zero_grad(set_to_none=False)
        ssd_fx.reset_stats()
        synchronize(self.device)
        level = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            loss = self.compiled(inputs, targets)
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - level if self.device.type == "cuda" else 0
        self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - start
        seen = asdict(ssd_fx.stats()) if self.ours else {}
        return Step(seconds, peak, loss.item(), **Step.figures(seen))


def pairs(engine: str, flags: argparse.Namespace) -> list[tuple[Step, Step]]:
    """(plain, ours), in neighbouring steps."""
    torch._dynamo.reset()
    trainings = (Training(flags, None), Training(flags, engine))
    taken = []
    for number in range(flags.warmup + flags.pairs):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        steps = {which: trainings[which].step() for which in order}
        taken.append((steps[0], steps[1]))
    return taken[flags.warmup :]


def system(flags: argparse.Namespace) -> dict[str, str]:
    cuda = flags.device == "cuda"
    memory = f", {torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB" if cuda else ""
    return {
        "device": torch.cuda.get_device_name(0) + memory if cuda else "cpu: a trial of this script, not a measurement",
        "driver": output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "host": f"{len(os.sched_getaffinity(0))} cores, kernel {platform.release()}",
        "directory": f"{flags.dir} on " + output(["findmnt", "-no", "FSTYPE,SOURCE", "-T", flags.dir]),
        "commit": output(["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]),
        "model": f"GPT, {flags.layers} layers, width {flags.width}, {flags.heads} heads, batch {flags.batch} x "
        f"{flags.seq}, {'bfloat16 autocast' if flags.amp else 'float32'}, budget {flags.budget}",
    }


def output(command: list[str]) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return f"unknown ({command[0]} does not answer)"
    return " ".join(found.split()) or "unknown"


def report(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [f"# {result['system']['device']}, {result['date']}", "", "Written by `make gpu` (benchmarks/gpu.py).", ""]
    lines += [f"- {name}: {text}" for name, text in result["system"].items()]
    lines += [f"- engine {name}: {text}" for name, text in result["serving"].items()]
    lines += [f"- engine {name}: not here: {text}" for name, text in result["missing"].items()]
    lines += ["", "## Device memory to and from the engine, MB/s: median (slowest to fastest)", ""]
    lines += ["| engine | MiB | write | read |", "|---|---|---|---|"]
    for row in result["bandwidth"]:
        write, read = ("{:.0f} ({:.0f} to {:.0f})".format(*row[name]) for name in ("write", "read"))
        lines.append(f"| {row['engine']} | {row['size_mib']} | {write} | {read} |")
    lines += ["", "## A training step beside plain Inductor: medians, peaks the highest", ""]
    columns = (
        "engine, step ms, plain ms, ratio of pairs, peak MiB, plain MiB, stall ms, saved MiB, written, read, given back"
    )
    lines += ["| " + " | ".join(columns.split(", ")) + " |", "|" + "---|" * len(columns.split(", "))]
    lines += [step_row(engine, taken) for engine, taken in result["steps"].items()]
    return "\n".join(lines) + "\n"


def step_row(engine: str, taken: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    plain, ours = ([pair[which] for pair in taken] for which in (0, 1))
    ratios = sorted(b["time_s"] / a["time_s"] for a, b in taken)

    def middle(steps: list[dict[str, Any]], name: str, scale: float) -> str:
        return f"{statistics.median(step[name] for step in steps) * scale:.1f}"

    cells = [engine, middle(ours, "time_s", 1e3), middle(plain, "time_s", 1e3)]
    cells += [f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"]
    cells += [f"{max(step['peak_bytes'] for step in steps) / MIB:.1f}" for steps in (ours, plain)]
    cells += [middle(ours, "stall_s", 1e3)]
    cells += [middle(ours, f"{name}_bytes", 1 / MIB) for name in ("saved", "written", "read", "forwarded")]
    return "| " + " | ".join(cells) + " |"


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", required=True, help="directory on the NVMe drive")
    add("--results", default=str(ROOT / "benchmarks" / "results"), help="where the results go, default %(default)s")
    add("--engines", help="comma-separated; default: all that serve on this machine")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: try the script out")
    add("--total", type=int, default=512 * MIB, help="bytes per bandwidth round, default %(default)s")
    add("--pairs", type=int, default=7, help="measured pairs of steps, default %(default)s")
    add("--warmup", type=int, default=3, help="pairs before them, default %(default)s")
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("batch", 8), ("seq", 1024), ("seed", 0)):
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    for name, rate in (("dropout", 0.1), ("lr", 3e-4)):
        add(f"--{name}", type=float, default=rate, help="default %(default)s")
    add("--budget", default="0", help="saved bytes that stay on the device, default %(default)s")
    add("--no-amp", dest="amp", action="store_false", help="float32 instead of bfloat16 autocast")
    add("--allow-tmpfs", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    flags.dir = os.path.abspath(flags.dir)
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parse_flags(arguments)
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here: torch sees no CUDA device, so nothing was run and nothing was written")
    os.makedirs(flags.dir, exist_ok=True)
    serving, missing = available(flags)
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "system": system(flags)}
    result |= {"serving": serving, "missing": missing, "flags": vars(flags), "bandwidth": [], "steps": {}}
    path = Path(flags.results) / f"{result['date']}-{slug(result['system']['device'])}"
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in serving:
        result["bandwidth"] += [asdict(bandwidth(name, size, flags)) for size in SIZES if size <= flags.total]
        write(path, result)
    for name in serving:
        result["steps"][name] = [tuple(asdict(step) for step in pair) for pair in pairs(name, flags)]
        write(path, result)  # after each engine: what was measured is kept if a later one takes too long
    print(report(result))
    print(f"written to {path}.json and .md")


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.split(",")[0].split(":")[0].lower()).strip("-")


def write(path: Path, result: dict[str, Any]) -> None:
    Path(f"{path}.json").write_text(json.dumps(result, indent=1) + "\n")
    Path(f"{path}.md").write_text(report(result))


if __name__ == "__main__":
    main()
