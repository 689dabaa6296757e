"""The options: names, types, meanings and defaults. `docs/options.md` is made from the docstring of `Config`.

Options come from `torch.compile(..., options={...})`, else from `SSD_FX_<NAME>` in the environment, else from the
defaults. Only this module reads options from the environment. `SSD_FX_ANY_TORCH` is no option (`versions.py`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch._inductor import list_options

from ssd_fx import versions
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.ranks import Ranks, dealt, in_a_directory, on_a_drive, parse_ranks
from ssd_fx.runtime.codec import CODECS
from ssd_fx.runtime.config import TIERS, RuntimeConfig
from ssd_fx.sizes import parse_budget, parse_bytes, parse_memory, parse_positive, parse_share, parse_tbw

_PREFIX = "SSD_FX_"


@dataclass(frozen=True)
class Config:
    """The options of one `torch.compile` call.

    `dirs`, `disk_limit`, `drive_tbw`, `host_budget` and the bandwidths of `machine` belong to the node. Its ranks share
    them. All other options belong to one process.

    dirs (a directory or a list of them; in the environment separated by `:`): Directories on the drives. A large
        tensor is striped over all of them; a small one goes to the least busy drive. Several ranks divide the
        directories among them. Default: the system's temporary directory.
    memory (a size, a share or `"auto"`): The most that all tensors of the process may take on the device that computes:
        parameters, gradients, the optimizer's state, activations of all graphs. A size (`"24GiB"`), a share of what the
        device has (`"90%"`), or `"auto"`, which is what others leave, less 5%. On the CPU the device has what the
        machine, the container and `RLIMIT_DATA` allow. The first step runs with the lowest peak, as with `budget=0`.
        From the second one on as much stays in memory as fits. Instead of `budget`. Default: no limit.
    budget (a size, a share or `"auto"`): Saved tensors that may stay in memory. A size (`"2GiB"`) is one budget over
        all graphs of the process; at run time the tensors stored last stay. A size below what one graph must keep in
        memory is an error that names the least possible size. A number below a MiB without a unit is an error, because
        100 may mean MiB or percent. 0 is never an error. It is the lowest peak of memory that is worth having: one up
        to 5% higher is taken if the step is a tenth faster. A share (`0.25`, `"25%"`) allows a peak that lies so far
        between the lowest and the one with everything kept. `"auto"` is the least of the shares 0, 0.05, 0.1 and so on
        whose step is predicted to take no longer than `slowdown` allows. If the drive of a CPU turns out to be slower
        than predicted, more stays in memory from then on.
    slowdown (a share): How much longer a step may become with `budget="auto"`, to need less memory: `0.05`, `"5%"`. All
        counts: waits for drives, what is computed again, and starting transfers. At 0.02 memory is nearly free. At 0.3,
        which is what a checkpoint of every layer costs, a step needs less memory than with that.
    spare (a flag): Spare the drive: in a graph that is a whole training step, with the loss, what does not lower the
        peak stays in memory. A budget in bytes other than 0 does not look at it. Turn it off where several forwards
        come before the first backward, as in some pipelines: there a share is the part of the bytes, too, that may
        stay of those that can leave.
    recompute (a flag): Recompute tensors where that is predicted to be faster than the drive.
    min_bytes (a size): Smaller tensors stay in memory, unless `ssd_fx.offload(x)` marks them.
    engine (a name): `"posix"` is direct file I/O. `"kvikio"` is GPUDirect Storage or an error; `"kvikio-forced"` also
        accepts its compatibility mode, which copies through host memory. `"memory"` copies to host memory, for
        comparisons. `"auto"` takes GPUDirect Storage for tensors on a GPU where it works, else direct file I/O. On
        accelerators that are not NVIDIA's, files are reached through pinned memory, which is slower.
    inner (a name): The compiler that gets the rewritten graphs: `"inductor"` or `"aot_eager"`.
    inflight (a size above 0, or `"auto"`): The most bytes that may be on their way to the drives. A store beyond it
        waits for room. `"auto"` is 128 MiB for tensors of the CPU. For those of a GPU it is 1/32 of its memory, because
        the host runs ahead of a GPU.
    prefetch (a size): Bytes that may be read before the graph asks for them.
    dump (a directory): Gets the plan and both rewritten graphs of everything that is compiled. The directory is made
        if it is missing. With this option no compiled graph comes from the compile cache.
    allow_tmpfs (a flag): Accept a directory that is in memory, which saves no memory.
    checksums (a flag): Compute a checksum of every block that is written, and compare it when the block is read.
    disk_limit (a size above 0): The most bytes that one set of options may take in each directory. Ranks divide it
        among their files. Default: no limit but the free space.
    drive_tbw (a number of TB): What the drives of `dirs` are rated to be written in all, summed over them: 1200 for two
        drives of 600 TBW. Only `ssd_fx.stats()` uses it, that of the last compilation, to say how long new drives
        would last at the present speed. It is not read from the drives, because SMART needs root and does not have the
        rating; `ssd-fx doctor` says what SMART has. Default: not known.
    host_budget (a size): Bytes of offloaded tensors that may be in host memory instead of on disk. On a GPU the plan
        chooses the tensors. On the CPU this is the same memory as that of `budget`. Tensors on their way from there to
        the drive take up to `inflight` bytes more, 128 MiB if that is `"auto"`.
    compression (a name, or names per tier): `"bitpack"` is lossless, and shrinks masks, small integers and the zeros
        of ReLU. `"fp8"` and `"int8"` are lossy. With them, floats that the backward compares with each other stay in
        memory: a maximum, and the tensor that it is of. `"int8"` makes 0 of what is below 1/254 of the largest of its
        block, so a backward that divides by such numbers returns infinities. A backward that takes `exp` of what it
        has read multiplies errors: that of `cross_entropy` under Inductor, with large logits. A name alone is for the
        drive. `{"host": "bitpack", "ssd": "fp8"}`, or `host=bitpack,ssd=fp8` in the environment, names one codec per
        tier. A tensor that enters no tier with a codec keeps its exact values. A slow drive makes more do so (`adapt`).
    adapt (a flag): Learn from the steps that ran. Stop writing a tensor that the program holds anyway, and read
        earlier what was waited for. On a CPU with `budget="auto"`, keep more in memory while the drive is slow.
    cpu_allocator (a flag): On the CPU, take the memory of all tensors of the process from 64 KiB on from ssd_fx's own
        allocator, from the first compilation on. It gives idle memory back to the system; malloc keeps most of it. A
        process that preloads its own malloc, such as jemalloc, is left alone.
    keep (patterns of module names; in the environment separated by `,`): What these modules save stays in memory,
        whatever the budget: `["head", "blocks.[0-3].attn", "*.norm"]`. Names are those of `named_modules()`. A pattern
        also holds for everything inside the modules that it names. A budget in bytes below what they keep is an error.
    offload (patterns of module names, as for `keep`): What these modules save is offloaded, whatever the budget, from
        `min_bytes` on. Where both options match, the innermost module decides. `ssd_fx.keep(x)` and
        `ssd_fx.offload(x)` in the model override both.
    machine (`"auto"`, `"default"` or a dictionary): The rates that plans are made for. `"auto"` measures them once,
        which takes some seconds, and keeps them in the user's cache directory. `"default"` takes typical rates and
        measures nothing. A dictionary, in the environment JSON, overrides typical rates: fields of
        `ssd_fx.passes.cost.machine.Machine` such as `{"flops": 3e14, "write_bw": 6e9}`.
    ranks (`"auto"` or a number): Processes that share this node. `"auto"` reads `LOCAL_WORLD_SIZE`, which torchrun
        sets, and is 1 without it. For a number above 1, `LOCAL_RANK` must say which of them this process is. 1 shares
        nothing. Default: `"auto"`.
    """

    dirs: tuple[str, ...] = ()
    memory: int | float | str = ""
    budget: int | float | str = "auto"
    slowdown: float = 0.05
    spare: bool = True
    recompute: bool = True
    min_bytes: int = 1 << 20
    engine: str = RuntimeConfig.engine
    inner: str = "inductor"
    inflight: int | str = "auto"
    prefetch: int = RuntimeConfig.prefetch
    dump: str = ""
    allow_tmpfs: bool = RuntimeConfig.allow_tmpfs
    checksums: bool = RuntimeConfig.checksums
    disk_limit: int = RuntimeConfig.disk_limit
    drive_tbw: float = 0.0
    host_budget: int = RuntimeConfig.host_budget
    compression: tuple[tuple[str, str], ...] = RuntimeConfig.compression
    adapt: bool = RuntimeConfig.adapt
    cpu_allocator: bool = True
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    machine: str = "auto"
    ranks: Ranks = field(default_factory=Ranks)

    @staticmethod
    def make(options: Mapping[str, Any] | None = None) -> Config:
        """Return the options of `options` and of the environment; the former win.

        Raises:
            ValueError: an unknown option, or a bad value; the message says what would be right.
        """
        names = [f.name for f in fields(Config)]
        for variable in os.environ:
            option = variable.removeprefix(_PREFIX).lower()
            if variable.startswith(_PREFIX) and variable != versions.ANYWAY and option not in names:
                raise ValueError(
                    f"the environment has {variable}, and ssd_fx has no such option{_known(option, names)}"
                )
        if not isinstance(options or {}, Mapping):
            raise ValueError(f"options={options!r} is no dictionary of options such as {{'dirs': ['/mnt/nvme']}}")
        given = dict(options or {})
        for name in given:
            if name not in names:
                raise ValueError(f"ssd_fx has no option {name!r}{_known(str(name), names)}")
        values: dict[str, Any] = {}
        for name in names:
            if name in given:
                values[name] = _PARSERS[name](name, given[name])
            elif _variable(name) in os.environ:
                values[name] = _from_environment(name)
        _one_of_memory_and_budget(values, given)
        if "dirs" not in values:
            values["dirs"] = (os.path.abspath(tempfile.gettempdir()),)
        if "ranks" not in values:
            values["ranks"] = _parse_ranks("ranks", "auto")
        return Config(**values)

    @property
    def own_dirs(self) -> tuple[str, ...]:
        """The directories of `dirs` that this rank writes to."""
        return dealt(self.dirs, self.ranks)

    @property
    def own_host_budget(self) -> int:
        """This rank's share of `host_budget`, in bytes."""
        return self.host_budget // self.ranks.count

    @property
    def own_disk_limit(self) -> int:
        """The most bytes of this rank's file in a directory; 0 for no limit."""
        if not self.disk_limit:
            return 0
        return max(1, self.disk_limit // in_a_directory(self.dirs, self.ranks))

    @property
    def own_drive_tbw(self) -> float:
        """This rank's share of what the drives are rated for, in TB; 0 if that is not known."""
        return self.drive_tbw / self.ranks.count

    @property
    def own_dump(self) -> str:
        """The directory of this rank's dump. Each rank has one, because their graphs have the same names."""
        if self.ranks.number is None or not self.dump:
            return self.dump
        return f"{self.dump}/rank{self.ranks.number}"

    def sharing(self) -> int:
        """How many ranks share the bandwidth of this one's drives. Directories of one file system are one drive.

        Raises:
            OSError: a directory that is missing.
        """
        if self.engine == "memory" or self.ranks.count == 1:
            return self.ranks.count
        return on_a_drive(self.dirs, self.ranks, lambda path: os.stat(path).st_dev)

    def share(self) -> str:
        """One line about this rank's share of the node; empty if the node is not shared."""
        if self.ranks.count == 1:
            return ""
        own = f"writes to {', '.join(self.own_dirs)}, whose bandwidth {self.sharing()} ranks share"
        return f"{self.ranks}: {own}; host_budget {self.own_host_budget} B, disk_limit {self.own_disk_limit} B"

    def digest(self) -> str:
        """Of the options under which equal graphs have different plans or counts; the same for all ranks of a node."""
        apart = ("dirs", "allow_tmpfs", "disk_limit", "drive_tbw", "dump", "ranks")  # of the node, or of where
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        if not self.memory:  # without it graphs have the names that they had before there was one
            del chosen["memory"]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()

    def runtime_json(self) -> str:
        """The options that the runtime needs, as canonical JSON. Compiled graphs carry it."""
        needed = {
            "adapt": self.adapt,
            "allow_tmpfs": self.allow_tmpfs,
            "checksums": self.checksums,
            "compression": dict(self.compression),
            "dirs": list(self.own_dirs),
            "disk_limit": self.own_disk_limit,
            "engine": self.engine,
            "host_budget": self.own_host_budget,
            "inflight": 0 if isinstance(self.inflight, str) else self.inflight,
            "prefetch": self.prefetch,
            "resident": self.budget if isinstance(self.budget, int) else 0,
        }
        if self.budget == "auto":
            needed |= {"resident_at_most": sys.maxsize, "ranks": self.ranks.count, "slowdown": float(self.slowdown)}
        if self.memory:
            needed |= {"memory": str(self.memory), "ranks": self.ranks.count}
        return json.dumps(needed, sort_keys=True, separators=(",", ":"))


def _one_of_memory_and_budget(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Take the plan with the lowest peak under `memory`. What is in `given` goes before the environment.

    Raises:
        ValueError: both are in `given`, or both in the environment.
    """
    if "memory" not in values:
        return
    if "budget" in values and ("memory" in given) == ("budget" in given):
        raise ValueError(
            f"memory={values['memory']!r} and budget={values['budget']!r} are two answers to one question; right would "
            "be memory alone, for the peak of the whole process, or budget alone, for the saved tensors that may stay"
        )
    if "budget" in given:
        del values["memory"]
    else:
        values["budget"] = 0


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _from_environment(name: str) -> Any:
    try:
        return _PARSERS[name](name, os.environ[_variable(name)])
    except ValueError as error:
        raise ValueError(f"{_variable(name)} in the environment: {error}") from None


def _known(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    inductors = name.replace("-", "_")
    if inductors in list_options():
        hint = f"; it is one of Inductor's, which torch._inductor.config.{inductors} sets for every backend."
    return f"{hint} The options are: {', '.join(names)}."


def _parse_dirs(name: str, value: object) -> tuple[str, ...]:
    """The absolute paths of one path, of several separated by the system's path separator, or of a sequence.

    A directory that is named twice, as by a link, is one: `disk_limit` holds for it.
    """
    parts: Any = [value] if isinstance(value, Path) else value
    if isinstance(value, str):
        parts = value.split(os.pathsep)
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(p, (str, Path)) and str(p) for p in parts):
        raise ValueError(
            f"option {name}={value!r} is not a list of directories; right would be e.g. ['/mnt/nvme0', '/mnt/nvme1']"
        )
    named: dict[str, str] = {}
    for path in (os.path.abspath(os.path.expanduser(p)) for p in parts):
        named.setdefault(os.path.realpath(path), path)
    return tuple(named.values())


def _parse_choice(*choices: str) -> Any:
    def parse(name: str, value: object) -> str:
        if value not in choices:
            raise ValueError(
                f"option {name}={value!r} is unknown; right would be one of {', '.join(map(repr, choices))}"
            )
        return str(value)

    return parse


def _parse_engine(name: str, value: object) -> str:
    from ssd_fx.runtime.engines.registry import ENGINES

    return str(_parse_choice(*sorted(ENGINES))(name, value))


def _parse_compression(name: str, value: object) -> tuple[tuple[str, str], ...]:
    """Pairs of tier and codec, of `"fp8"`, `"host=bitpack,ssd=fp8"`, a mapping of tiers to codecs, or nothing."""
    given = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip() not in ("", "none", "off")]
        codecs = {tier or "ssd": codec for tier, _, codec in (part.rpartition("=") for part in parts)}
        given = codecs if len(codecs) == len(parts) else value  # which is none: it names a tier twice
    if given in (None, False):
        given = {}
    if not isinstance(given, Mapping) or not all(t in TIERS and c in CODECS for t, c in given.items()):
        raise ValueError(
            f"option {name}={value!r} is no compression; right would be one of {', '.join(map(repr, CODECS))}, or one "
            f"for each tier such as 'host=bitpack,ssd=fp8' (tiers: {', '.join(TIERS)})"
        )
    return tuple(sorted(given.items()))


def _parse_patterns(name: str, value: object) -> tuple[str, ...]:
    """The patterns of one pattern, of several separated by commas, or of a sequence."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not all(isinstance(p, str) for p in parts):
        raise ValueError(
            f"option {name}={value!r} is no list of module name patterns; right would be e.g. ['blocks.0', '*.mlp']"
        )
    return tuple(dict.fromkeys(p.strip() for p in parts if p.strip()))


def _parse_path(name: str, value: object) -> str:
    if not isinstance(value, (str, Path)):
        raise ValueError(f"option {name}={value!r} is not a path")
    return os.path.abspath(os.path.expanduser(value)) if str(value) else ""


def _parse_flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"option {name}={value!r} is neither true nor false")


def _parse_machine(name: str, value: object) -> str:
    """`"auto"`, `"default"`, or rates, which may be a mapping or JSON, as canonical JSON."""
    if value in ("auto", "default"):
        return str(value)
    try:
        given = json.loads(value) if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise ValueError("no dictionary of rates")
        Machine.default(torch.device("cpu"), 1).with_rates(given)
    except ValueError as error:
        raise ValueError(
            f"option {name}={value!r} is no machine ({error}); "
            "right would be 'auto', 'default' or rates such as {\"flops\": 3e14, \"write_bw\": 6e9}"
        ) from None
    return json.dumps(dict(given), sort_keys=True)


def _parse_inflight(name: str, value: object) -> int | str:
    return "auto" if value == "auto" else parse_positive(name, value)


def _parse_disk_limit(name: str, value: object) -> int:
    nbytes = parse_bytes(name, value)
    if not nbytes:
        raise ValueError(f"option {name}={value!r} lets nothing be written; without the option there is no limit")
    return nbytes


def _parse_ranks(name: str, value: object) -> Ranks:
    return parse_ranks(name, value, os.environ)


_PARSERS: dict[str, Any] = {
    "dirs": _parse_dirs,
    "memory": parse_memory,
    "budget": parse_budget,
    "slowdown": parse_share,
    "spare": _parse_flag,
    "recompute": _parse_flag,
    "min_bytes": parse_bytes,
    "engine": _parse_engine,
    "inner": _parse_choice("inductor", "aot_eager"),
    "inflight": _parse_inflight,
    "prefetch": parse_bytes,
    "dump": _parse_path,
    "allow_tmpfs": _parse_flag,
    "checksums": _parse_flag,
    "disk_limit": _parse_disk_limit,
    "drive_tbw": parse_tbw,
    "host_budget": parse_bytes,
    "compression": _parse_compression,
    "adapt": _parse_flag,
    "cpu_allocator": _parse_flag,
    "keep": _parse_patterns,
    "offload": _parse_patterns,
    "machine": _parse_machine,
    "ranks": _parse_ranks,
}
