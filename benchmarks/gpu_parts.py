"""All that is to be seen on a GPU, in parts of a few minutes: `make gpu`, or one of them: `make gpu-calibrate`.

python benchmarks/gpu_parts.py --dir DIR --out OUT                  # all
python benchmarks/gpu_parts.py --dir DIR --out OUT info bandwidth   # these
python benchmarks/gpu_parts.py --dir DIR --out OUT tests            # the tests, at once
python benchmarks/gpu_parts.py --dir DIR --out OUT ways             # training steps: they compile at once
python benchmarks/gpu_parts.py --dir DIR --out OUT pareto           # ours at the peak of a checkpoint per layer
python benchmarks/gpu_parts.py --dir DIR --out OUT long             # long context, beside recomputing
python benchmarks/gpu_parts.py --dir DIR --out OUT fit              # the option memory: three limits each
python benchmarks/gpu_parts.py --dir DIR --out OUT --resume         # without those that ended well in OUT
python benchmarks/gpu_parts.py --dry-run                            # what would be run, and how long it may take

Every part is a row of processes of its own, has less than five minutes, and stops no other part when it fails. Tests
run at once, and what is timed alone or in turns. The output goes to OUT/PART.txt too, and how a part ended to
OUT/summary.json, at once; the last thing printed is a table of it. The exit status is 1 if a part failed. The parts
follow the order in which one would want to know.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from parts import Ended, Part, filled, run  # a neighbour of this file

BENCH = "{python} benchmarks/gpu_bandwidth.py --dir {dir} --results {out}"
WAYS = "{python} benchmarks/gpu_ways.py --dir {dir} --results {out} --turns {out}/turns --patience 200"
LARGE = f"{WAYS} --bfloat16 --optimizer sgd"
MEASURED = ("auto", "memory", "posix")
# Shares for which the planned peak is the one that a checkpoint per layer had on an H200 (docs/results/gpu), and lower
# ones, as the planner predicts them for that machine. PyTorch has the shares of least peak.
AT_CHECKPOINT = {
    "narrow": (
        "--layers 6 --width 4096 --heads 32 --batch 16",
        "memory:auto memory:0.2 memory:0 checkpoint recompute:0.7 blocks:memory:0",
    ),
    "gpt": ("", "memory:auto memory:0.088 memory:0.05 checkpoint recompute:0.1"),
    "middle": (
        "--layers 3 --width 8192 --heads 64 --batch 16",
        "memory:auto memory:0.37 memory:0.1 checkpoint recompute:0.1",
    ),
}
TESTS = "{python} -m pytest -m gpu -q"
FEW = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}  # of each of the processes that compile at once
STEPS = ("ways", "pareto", "long", "fit")  # training steps: parts whose names begin so compile at once
EARLY = "-v --tb=short --maxfail=5"  # reasons are printed at the end, which must come before the part's time is over


def row(layers: int, tokens: int) -> str:
    """The flags of long context: layers of Llama 3's 8B with its words, one row of so many tokens."""
    return f"--family long --layers {layers} --width 4096 --heads 32 --batch 1 --seq {tokens}"


def long(name: str, layers: int, tokens: int, ways: str) -> Part:
    """Long context, which benchmarks/long_context.py predicts."""
    command = f"{LARGE} --name long-{name} {row(layers, tokens)} --warmup 2 --rounds 5 --seconds 30 --ways {ways}"
    what = f"{layers} layers of width 4,096 with grouped queries, {tokens:,} tokens"
    return Part(f"long-{name}", what, 290, (command,), False, "", FEW)


def fit(name: str, what: str, common: str, shape: str, limits: str) -> Part:
    """The option `memory`: a tight limit, one half way and a wide one, each in a process of its own."""
    flags = common.replace("gpu_ways.py", "gpu_fit.py")
    command = f"{flags} --name fit-{name} {shape} --limits {limits}"
    return Part(f"fit-{name}", f"{what}, under three limits of memory", 180, (command,), environment=FEW)


def pareto(name: str, what: str, common: str) -> Part:
    """Ours at the peak of a checkpoint per layer, beside it and PyTorch's `activation_memory_budget`."""
    shape, ways = AT_CHECKPOINT[name]
    command = f"{common} --name pareto-{name} {shape} --warmup 3 --rounds 9 --seconds 15 --ways {ways}"
    return Part(f"pareto-{name}", f"{what}, at the peak of a checkpoint per layer", 290, (command,), False, "", FEW)


PARTS = (
    Part(
        "info",
        "the machine, the package, what small things cost",
        60,
        (
            "nvidia-smi",
            "df -hT {dir}",
            "{python} -m ssd_fx doctor",
            "{python} benchmarks/gpu_costs.py",
            "{python} benchmarks/gpu_attention.py",
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
        "capture",
        "somebody captures a CUDA graph while our threads work",
        60,
        (TESTS + " tests/gpu/test_gpu_capture.py",),
        alone=False,
        environment={"GPU_ENGINES": "memory,posix"},
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
        (TESTS + " -n {workers} tests/gpu/test_gpu_training.py",),
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
        (f"{{python}} -m pytest -m gpu {EARLY} -n {{workers}} tests/gpu/test_gpu_models.py",),
        alone=False,
        needs="module transformers",
        environment={"GPU_ENGINES": "memory,posix,kvikio-forced"},
    ),
    Part(
        "calibrate",
        "the rates that plans are made for, of every engine that steps are measured with, while nothing else runs",
        60,
        (
            *(f"env SSD_FX_ENGINE={engine} {{python}} -m ssd_fx calibrate {{dir}}" for engine in MEASURED),
            "cp {cache}/ssd_fx/machine.json {out}/machine.json",
        ),
    ),
    long("64k", 3, 65_536, "memory:auto memory:0 checkpoint"),
    long("16k", 6, 16_384, "memory:auto memory:0 checkpoint host"),
    Part(
        "bandwidth",
        "engines memory and posix with 1, 8 and 64 MiB, and the CPU time of the I/O threads",
        60,
        (BENCH + " --name bandwidth --engines memory,posix",),
    ),
    Part(
        "ram",
        "engine posix on a directory in memory, a stand-in for drives that are faster than the one here",
        60,
        (BENCH.replace("{dir}", "{ram}") + " --allow-tmpfs --name ram --engines posix",),
    ),
    Part(
        "ways-wide",
        "2 layers of width 12,288, whose steps are long enough for host memory, beside recomputing",
        290,
        (
            f"{LARGE} --name wide --layers 2 --width 12288 --heads 96 --batch 12 --profile --seconds 40 "
            "--ways memory:auto memory:0 posix:auto:16GiB checkpoint",
        ),
        alone=False,
        environment=FEW,
    ),
    Part(
        "ways-middle",
        "3 layers of width 8,192",
        290,
        (
            f"{LARGE} --name middle --layers 3 --width 8192 --heads 64 --batch 16 --seconds 30 "
            "--ways memory:auto memory:0 checkpoint",
        ),
        alone=False,
        environment=FEW,
    ),
    Part(
        "ways-narrow",
        "6 layers of width 4,096, also compiled one by one",
        290,
        (
            f"{LARGE} --name narrow --layers 6 --width 4096 --heads 32 --batch 16 --seconds 30 "
            "--ways memory:auto memory:0 blocks:memory:0 checkpoint",
        ),
        alone=False,
        environment=FEW,
    ),
    Part(
        "ways-gpt",
        "12 layers of width 768: host memory, the drive behind it, and recomputing",
        290,
        (f"{WAYS} --name gpt --seconds 20 --ways memory:auto memory:0 posix:auto:4GiB checkpoint",),
        alone=False,
        environment=FEW,
    ),
    Part(
        "ways-drive",
        "4 layers, nothing stays",
        290,
        (f"{WAYS} --name drive --layers 4 --rounds 5 --seconds 20 --ways posix:0",),
        alone=False,
        environment=FEW,
    ),
    Part(
        "runtime",
        "the runtime's tests, as they are on a machine with a GPU",
        200,
        (f"{{python}} -m pytest {EARLY} -n 4 tests/runtime",),
    ),
    pareto("narrow", "6 layers of width 4,096", LARGE),
    pareto("gpt", "12 layers of width 768", WAYS),
    pareto("middle", "3 layers of width 8,192", LARGE),
    fit("narrow", "6 layers of width 4,096", LARGE, AT_CHECKPOINT["narrow"][0], "8704MiB 10GiB 14GiB"),
    fit("gpt", "12 layers of width 768", WAYS, AT_CHECKPOINT["gpt"][0], "2GiB 2560MiB 4GiB"),
    fit("middle", "3 layers of width 8,192", LARGE, AT_CHECKPOINT["middle"][0], "18GiB 20GiB 24GiB"),
    fit("long", "3 layers of width 4,096, one row of 65,536 tokens", LARGE, row(3, 65_536), "26GiB 34GiB 50GiB"),
    long("tier", 3, 32_768, "memory:auto posix:auto:16GiB checkpoint"),
    Part(
        "kvikio",
        "real GPUDirect Storage: round trips and bandwidth",
        240,
        (
            TESTS + " tests/gpu/test_gpu_roundtrip.py -k kvikio",
            BENCH + " --name kvikio --engines kvikio --sizes 1 8 64",
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
            BENCH + " --name kvikio-forced --engines kvikio-forced --sizes 64",
        ),
        needs="module kvikio",
        environment={"GPU_ENGINES": "kvikio-forced"},
    ),
)


def table(ended: Sequence[Ended]) -> str:
    return "\n".join(["", f"{'part':16}{'s':>6}  result", *(f"{e.name:16}{e.seconds:6.0f}  {e.result}" for e in ended)])


def keep(path: Path, ended: Sequence[Ended]) -> None:
    """Adds the parts to those that an earlier run left there."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {e.name: asdict(e) for e in ended}, indent=1) + "\n")


def done(path: Path) -> set[str]:
    """The parts that ended well, as `keep` wrote it down."""
    before = json.loads(path.read_text()) if path.exists() else {}
    return {name for name, each in before.items() if each["result"] == "ok"}


def chosen(names: Sequence[str]) -> list[Part]:
    """Parts by name, in the order of PARTS; all without names. "ways", "pareto" and "long" are all with such a name,
    "tests" the others that run at once.

    Raises: SystemExit for a name that is none.
    """
    unknown = [name for name in names if not any(named(part, name) for part in PARTS)]
    if unknown:
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    return [part for part in PARTS if not names or any(named(part, name) for name in names)]


def named(part: Part, name: str) -> bool:
    if name == "tests":
        return not part.alone and not any(named(part, each) for each in STEPS)
    return part.name == name or (name in STEPS and part.name.startswith(f"{name}-"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", help=f"of {', '.join(part.name for part in PARTS)}; ways, pareto, long, tests: all of these"
    )
    parser.add_argument("--dir", default="demo-out/gpu", help="directory on the drive, default %(default)s")
    parser.add_argument("--out", default="demo-out/gpu-results", help="where results go, default %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--resume", action="store_true", help="leave out what ended well in --out before")
    flags = parser.parse_args(arguments)
    summary = Path(flags.out, "summary.json")
    over = done(summary) if flags.resume else set()
    parts = [part for part in chosen(flags.parts) if part.name not in over]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    where = {"python": sys.executable, "dir": os.path.abspath(flags.dir), "out": os.path.abspath(flags.out)}
    where["ram"] = "/dev/shm/ssd_fx-gpu-parts"
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
    for path in (where["dir"], where["out"], where["ram"]):
        os.makedirs(path, exist_ok=True)
    ended = []
    for each in run(parts, where, Path(where["out"])):
        ended.append(each)
        keep(summary, ended)
    print(table(ended))
    return int(any(each.failed for each in ended))


if __name__ == "__main__":
    sys.exit(main())
