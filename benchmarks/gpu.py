"""On a GPU: how fast each engine moves device memory, and what offloading does to the training step of a GPT.

python benchmarks/gpu.py --dir /mnt/nvme         # prints two tables and writes <results>/<date>-<device>.json, .md
python benchmarks/gpu.py --report FILE.json ...  # prints the tables of what was measured before

gpu_parts.py (`make gpu`) runs it in short parts.

How it is measured:
- Bandwidth: `--total` bytes in tensors of `--sizes` MiB, all started at once, clock stopped when the engine has
  finished all of them; the second to fourth of four rounds, so that the file is there; what was read is compared. The
  CPU time is that of the I/O threads.
- Step: plain Inductor and ssd_fx take turns in one process, with equal weights, data and seeds; which of them is first
  alternates. A step is forward, backward and optimizer, between two synchronisations. The peak is that of forward and
  backward above the level before them, as torch's allocator counts; gradients lie below that level. On a GPU the first
  steps, and one of so many later, have an event around every node: none of these is measured.
- `--profile`: kernels of one more step, by torch.profiler, and its timeline. `--predicted`: the plan's figures beside.
- Engines that cannot serve here are listed with the reason. kvikio-forced needs a process of its own, for cuFile is
  configured once: it is measured when it is the only one that is named. Without a GPU nothing is run or written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_bandwidth import MIB, bandwidth  # neighbours of this file
from gpu_report import report
from gpu_steps import OPTIMIZERS, steps
from system import write_json

from ssd_fx.runtime.config import RuntimeConfig
from ssd_fx.runtime.device.device_trace import RUNS
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.registry import ENGINES, make_engine

ROOT = Path(__file__).resolve().parent.parent
ALONE = "kvikio-forced"
PRECISION = {(True, False): "bfloat16 autocast", (False, False): "float32", (False, True): "bfloat16"}


def available(flags: argparse.Namespace) -> tuple[dict[str, str], dict[str, str]]:
    """Engines that serve on this device, with what is to be known of them, and the others with the reason."""
    names = flags.engines.split(",") if flags.engines else [name for name in ENGINES if name not in ("auto", ALONE)]
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
    if name.startswith("kvikio"):
        found = cufile.status(forced=name.endswith("-forced"))
        return f"{found.version}, " + ("real GPUDirect Storage" if found.real else f"through the host: {found.reason}")
    return "through pinned host memory" if name == "posix" else "host memory, no drive"


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
        f"{flags.seq}, {PRECISION[flags.amp, flags.bfloat16]}, {flags.optimizer}",
        "options": f"budget {flags.budget}, host budget {flags.host_budget}",
    }


def results_path(flags: argparse.Namespace, date: str, device: str, name: str) -> Path:
    """Where the results of a run go, without a suffix; the directory is there."""
    path = Path(flags.results) / "-".join(filter(None, (date, slug(device), name)))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def output(command: list[str]) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return f"unknown ({command[0]} does not answer)"
    return " ".join(found.split()) or "unknown"


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dir", help="directory on the NVMe drive")
    add("--report", nargs="+", metavar="JSON", help="only print what these say")
    add("--results", default=str(ROOT / "benchmarks" / "results"), help="where the results go, default %(default)s")
    add("--name", default="", help="added to the names of the results")
    add("--no-md", dest="md", action="store_false", help="write no Markdown beside the JSON")
    add("--engines", help="comma-separated; default: all that serve on this machine")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: try the script out")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--bandwidth-only", action="store_true", help="no steps")
    one.add_argument("--steps-only", action="store_true", help="no bandwidth")
    add("--sizes", type=int, nargs="+", default=[1, 8, 64], metavar="MIB", help="of a tensor, default %(default)s")
    add("--total", type=int, default=512 * MIB, help="bytes per bandwidth round, default %(default)s")
    add("--pairs", type=int, default=7, help="measured pairs of steps, default %(default)s")
    add("--warmup", type=int, default=RUNS + 1, help="pairs before them, default %(default)s")
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("batch", 8), ("seq", 1024), ("seed", 0)):
        add(f"--{name}", type=int, default=default, help="default %(default)s")
    for name, rate in (("dropout", 0.1), ("lr", 3e-4)):
        add(f"--{name}", type=float, default=rate, help="default %(default)s")
    add("--optimizer", default="adamw", choices=tuple(OPTIMIZERS), help="sgd: no state, for wide models")
    add("--budget", default="0", help="saved bytes that stay on the device, default %(default)s")
    add("--host-budget", default="0", help="bytes that may be in host memory instead of on disk, default %(default)s")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--no-amp", dest="amp", action="store_false", help="float32 instead of bfloat16 autocast")
    precision.add_argument("--bfloat16", action="store_true", help="weights too, and no autocast")
    add("--untimed", action="store_true", help="no event around any node, so that a short warm-up does")
    add("--profile", action="store_true", help="kernels and timeline of one more step")
    add("--predicted", action="store_true", help="what the plan said beside what was measured")
    add("--allow-tmpfs", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    flags.amp &= not flags.bfloat16
    check(parser, flags)
    return flags


def check(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Ends the program for flags that would measure something else than they say."""
    if flags.report:
        return
    if not flags.dir:
        parser.error("--dir is needed: a directory on the NVMe drive")
    flags.dir = os.path.abspath(flags.dir)
    if flags.engines and ALONE in flags.engines.split(",")[1:] + flags.engines.split(",")[:-1]:
        parser.error(f"{ALONE} needs a process of its own: --engines {ALONE}")
    traced = [n for n in range(flags.warmup, flags.warmup + flags.pairs) if n < RUNS or n % RUNS == 0]
    if flags.device == "cuda" and traced and not (flags.bandwidth_only or flags.untimed):
        parser.error(
            f"pair {traced[0]} would be measured, and has events around every node, as the first {RUNS} and one of "
            f"{RUNS} later; right would be --warmup {RUNS + 1} and --pairs of at most {RUNS - 1}, or --untimed"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parse_flags(arguments)
    if flags.report:
        print(*(report(json.loads(Path(path).read_text())) for path in flags.report), sep="\n", end="")
        return
    if flags.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no GPU here: torch sees no CUDA device, so nothing was run and nothing was written")
    os.makedirs(flags.dir, exist_ok=True)
    serving, missing = available(flags)
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "system": system(flags)}
    result |= {"serving": serving, "missing": missing, "flags": vars(flags), "bandwidth": [], "steps": {}}
    path = results_path(flags, result["date"], result["system"]["device"], flags.name)
    sizes = [size * MIB for size in flags.sizes if size * MIB <= flags.total]
    for name in () if flags.steps_only else serving:
        result["bandwidth"] += [asdict(bandwidth(name, size, flags)) for size in sizes]
        write(path, result, flags.md)
    for name in () if flags.bandwidth_only else serving:
        result["steps"][name] = steps(name, flags, path)
        write(path, result, flags.md)  # after each engine: what was measured is kept if a later one takes too long
    if not serving:
        raise SystemExit(
            "\n".join(["no engine serves here, so nothing was measured:", *map(": ".join, missing.items())])
        )
    print(report(result))
    print(f"written to {path}.json" + (" and .md" if flags.md else ""))


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.split(",")[0].split(":")[0].lower()).strip("-")


def write(path: Path, result: dict[str, Any], md: bool) -> None:
    write_json(f"{path}.json", result)
    if md:
        Path(f"{path}.md").write_text(report(result))


if __name__ == "__main__":
    main()
