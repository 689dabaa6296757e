"""What `ssd-fx doctor` says of the software, the compiler and the device."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

import torch

import ssd_fx
from ssd_fx import versions
from ssd_fx.calibration import cache
from ssd_fx.command.directories import unfit
from ssd_fx.command.findings import Finding
from ssd_fx.config import Config
from ssd_fx.passes.cost.machine import described
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.engines import cufile
from ssd_fx.runtime.engines.registry import check_engine
from ssd_fx.runtime.errors import first_line


def findings(directories: Sequence[str] = ()) -> Iterator[Finding]:
    """The findings about versions, compilers, device, GPUDirect Storage, the environment, and rates of `directories`.

    Raises:
        ValueError: a bad option in the environment.
    """
    yield _versions()
    yield _compiler()
    yield _pool()
    yield _device()
    yield gpudirect(cufile.status())
    yield _options()
    config = Config.make()
    if not directories and config.engine != "memory":
        may_be_in_memory = config.allow_tmpfs or "SSD_FX_DIRS" not in os.environ  # the default is nobody's choice
        yield from filter(None, (unfit(path, allow_tmpfs=may_be_in_memory) for path in config.dirs))
    yield from _rates(directories)


def _versions() -> Finding:
    system = f"Python {platform.python_version()}, Linux {platform.release()}"
    says = f"{ssd_fx.__version__}, torch {torch.__version__}, {system}"
    figures = {"ssd_fx": ssd_fx.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.__version__.startswith(f"{versions.TESTED[0]}.{versions.TESTED[1]}."):
        return Finding("ssd_fx", says, figures=figures)
    tested = ".".join(map(str, versions.TESTED))
    return Finding("ssd_fx", says, "warn", f"torch {tested} is what is tested regularly", figures)


def _compiler() -> Finding:
    """The finding about the C++ compiler: Inductor needs one for the CPU, and our allocator does, too."""
    from ssd_fx.compat.inductor import get_cpp_compiler

    right = "install g++, as by `apt install g++`, or name a compiler in CXX; Inductor cannot compile for a CPU without"
    try:
        found = get_cpp_compiler()
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    except Exception as error:  # torch's own kinds differ between its versions
        return Finding("compiler", f"no C++ compiler works: {first_line(error)}", "bad", right)
    return Finding("compiler", f"{found}: {first_line(said)}")


def _pool() -> Finding:
    try:
        check_engine("posix")
    except RuntimeError as error:
        return Finding("I/O threads", str(error), "bad", "install gcc, or a wheel of ssd_fx, which has the pool built")
    return Finding("I/O threads", "the native pool is there")


def _device() -> Finding:
    if not torch.cuda.is_available():
        threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
        says = f"CPU, {threads} threads on {cores} cores; torch sees no CUDA device"
        return Finding("device", says, figures={"threads": threads, "cores": cores})
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties().total_memory
    says = f"{name}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return Finding("device", says, figures={"name": name, "memory_bytes": memory})


def gpudirect(found: cufile.Status) -> Finding:
    """Whether GPU and drive exchange data directly, or why not."""
    version = f"{found.version}: " if found.version else ""
    figures = {"real": found.real}
    if found.real:
        says = "GPUDirect Storage is real; blocks are not verified with it, whatever `checksums` says"
        return Finding(cufile.NAME, version + says, figures=figures)
    return Finding(cufile.NAME, f"{version}no GPUDirect Storage: {found.reason}", figures=figures)


def _options() -> Finding:
    """The options that the environment sets.

    Raises:
        ValueError: a bad one.
    """
    config = Config.make()
    named = [f.name for f in fields(Config) if f"SSD_FX_{f.name.upper()}" in os.environ]
    values = {name: getattr(config, name) for name in named}
    says = ", ".join(f"{name}={value!r}" for name, value in values.items())
    figures = {name: str(value) for name, value in values.items()}
    return Finding("options", f"the environment sets {says or 'none'}", figures=figures)


def _rates(directories: Sequence[str]) -> Iterator[Finding]:
    """The rates that plans are made for here and now: measured earlier, or else typical ones.

    The drives are those of `directories`, each alone and all together as a stripe, or the stripe of the default ones.
    Measurements of other directories, or with other threads, versions of torch or options, are only counted. Several
    directories are taken for those of one stripe, so it is the stripe that should have been measured.
    """
    known: dict[str, Mapping[str, object]] = {}
    try:
        known = {key: entry.rates for key, entry in cache.read().items() if entry.rates}
    except (OSError, ValueError) as error:
        yield Finding("rates", f"{cache.path()} is of no use ({error})", "warn")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute, threads = cache.compute_key(device), torch.get_num_threads()
    drives = _disks(directories, device)
    here = {compute: f"{threads} thread{'' if threads == 1 else 's'}, torch {torch.__version__}"} | dict(drives)
    for key in [key for key in here if key in known]:
        lines = "".join(f"\n{'':12}{line}" for line in described(known[key]))
        yield Finding(key.partition(" ")[0], f"{here[key]}{lines}", figures=known[key])
    others = len(known.keys() - here.keys())
    if others:
        says = f"{others} more are kept, of other directories, threads, options or versions: {cache.path()}"
        yield Finding("rates", says, figures={"others": others})
    of = [] if compute in known else [f"compute ({here[compute]})"]
    of += [words for key, words in drives[-1:] if key not in known]
    if of and Config.make().machine == "auto":
        says = f"those of {' and '.join(of)} are typical ones, not measured on this machine"
        right = "`ssd-fx calibrate DIR...` measures them, best when nothing else runs; the first compilation tries to"
        yield Finding("rates", says, "warn", right)


def _disks(directories: Sequence[str], device: torch.device) -> list[tuple[str, str]]:
    """The drives that may have been measured: their key in the cache, and words for it. The last ones are the stripe.

    They are those of the directories that exist. The default ones are a stripe; none if one of them does not exist.
    """
    there = [each for each in directories if os.path.isdir(each)]
    asked: list[dict[str, object]] = [{"dirs": dirs} for dirs in (*([each] for each in there), there) if dirs]
    configs = [Config.make(options) for options in (asked if directories else [{}])]
    return [
        (
            cache.disk_key(parse(config.runtime_json()), device),
            f"{' '.join(config.dirs)} by engine {config.engine}" + ("" if config.checksums else " without checksums"),
        )
        for config in configs
        if all(map(os.path.isdir, config.dirs))
    ]
