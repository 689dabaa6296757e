"""The options: what may be said, what it means, and what is wrong with what was said.

Options come from `torch.compile(..., options={...})`, else from `SSD_FX_<NAME>` in the environment, else from the
defaults. This is the only module that reads the environment, but for `SSD_FX_ANY_TORCH` of versions.py.
"""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ssd_fx import versions
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.ranks import Ranks, dealt, in_a_directory, on_a_drive, parse_ranks
from ssd_fx.runtime.codec import CODECS
from ssd_fx.runtime.config import TIERS
from ssd_fx.sizes import parse_budget, parse_bytes, parse_positive

_MIB = 2**20


@dataclass(frozen=True)
class Config:
    """The options of one `torch.compile` call.

    `dirs`, `disk_limit`, `host_budget` and the bandwidths of `machine` are of the node, whose ranks share them; all
    else is of each process.

    dirs: directories on the drives that take the activations; several are used in turn. Default: the system's
        temporary directory.
    budget: saved tensors that may stay resident. A share of each graph's saved bytes (a float from 0 to 1): the plan
        keeps at most that share of what can leave, and memory stays as far below its peak with everything kept. Bytes
        (`"2GiB"`, an int): one budget over all graphs of the process, kept at run time; the oldest tensors leave first.
        A size that is less than what must stay of one graph (marks, small storages, what cannot be offloaded) is a
        ValueError when that is compiled, which says the least that can be met; 0 bounds nothing that must stay.
        `"auto"`: the least share that is predicted to cost no wait. Default: 0, all that can leave leaves.
    recompute: compute tensors again instead where that is predicted to be faster than the drive. Default: on.
    min_bytes: smaller storages always stay. Default: 1 MiB.
    engine: `"auto"`: GPUDirect Storage for tensors on a GPU where it is real, else direct file I/O; `"posix"`: direct
        file I/O; `"kvikio"`: GPUDirect Storage or an error, `"kvikio-forced"`: cuFile through host memory if need be;
        `"memory"`: host memory, for comparisons.
    inner: the compiler behind: `"inductor"` or `"aot_eager"`.
    inflight: bytes that may be waiting to be written; a store beyond it waits. Default: 128 MiB.
    prefetch: bytes that may be loaded before they are due. Default: 64 MiB.
    dump: directory that gets the plan and both rewritten graphs of everything compiled; turns the compile cache off.
    allow_tmpfs: accept a directory in memory, which frees no memory.
    checksums: sum up every block when it is written and compare when it is read. Default: on.
    disk_limit: the most bytes that the file in one directory may have; 0, the default: what the file system has.
    host_budget: bytes of offloaded tensors that may rest in host memory before they move on to disk; on their way there
        they take up to `inflight` bytes more. Default: 0.
    compression: none (the default), or a codec for what goes to disk: `"bitpack"` (lossless, for what is small by
        nature), `"fp8"` or `"int8"` (lossy); or one per tier, `{"host": "bitpack", "ssd": "fp8"}` or
        `"host=bitpack,ssd=fp8"`.
    adapt: stop writing tensors that somebody else keeps anyway, read earlier what was waited for. Default: on.
    keep: patterns of module names (`["head", "blocks.[0-3].attn", "*.norm"]`) whose saved tensors stay, whatever the
        budget; one in bytes that they alone exceed is an error. Names are those of `named_modules()`; a pattern holds
        for everything inside the modules it names.
    offload: patterns of module names whose saved tensors of at least `min_bytes` leave, whatever the budget. Where both
        match, the innermost module decides, and `ssd_fx.keep(x)` or `ssd_fx.offload(x)` in the model before that.
    machine: the rates that the plan is made for. `"auto"`: measured once, which takes some seconds, and kept in the
        user's cache directory; `"default"`: typical ones, nothing is measured; or a dictionary (in the environment
        JSON) of the fields of `ssd_fx.passes.cost.machine.Machine`, e.g. `{"flops": 3e14, "write_bw": 6e9}`, to plan
        for another.
    profile: a file that `ssd_fx.save_profile` wrote: the plan is made with its measured times. Default: none.
    ranks: how many processes of this node share it. `"auto"`, the default: `LOCAL_WORLD_SIZE`, which torchrun sets, or
        1. With a number above 1 `LOCAL_RANK` says which of them this one is. 1: all that is named is this process's.
    """

    dirs: tuple[str, ...] = ()
    budget: int | float | str = 0
    recompute: bool = True
    min_bytes: int = _MIB
    engine: str = "auto"
    inner: str = "inductor"
    inflight: int = 128 * _MIB
    prefetch: int = 64 * _MIB
    dump: str = ""
    allow_tmpfs: bool = False
    checksums: bool = True
    disk_limit: int = 0
    host_budget: int = 0
    compression: tuple[tuple[str, str], ...] = ()
    adapt: bool = True
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    machine: str = "auto"
    profile: str = ""
    ranks: Ranks = field(default_factory=Ranks)

    @staticmethod
    def make(options: Mapping[str, Any] | None = None) -> Config:
        """Read `options` and the environment.

        Raises:
            ValueError: an unknown option, or a value that is none; the message says what would be right.
        """
        names = [f.name for f in fields(Config)]
        own = [n for n in os.environ if n.startswith("SSD_FX_") and n != versions.ANYWAY]
        unknown = [n for n in own if n[7:].lower() not in names]
        if unknown:
            raise ValueError(
                f"the environment has {unknown[0]}, and ssd_fx has no such option{_known(unknown[0][7:], names)}"
            )
        given = {n: os.environ[f"SSD_FX_{n.upper()}"] for n in names if f"SSD_FX_{n.upper()}" in os.environ}
        if not isinstance(options or {}, Mapping):
            raise ValueError(f"options={options!r} is no dictionary of options such as {{'dirs': ['/mnt/nvme']}}")
        for name, value in (options or {}).items():
            if name not in names:
                raise ValueError(f"ssd_fx has no option {name!r}{_known(str(name), names)}")
            given[name] = value
        said = options or {}
        values = {n: _PARSERS[n](n, value) if n in said else _from_environment(n, value) for n, value in given.items()}
        values.setdefault("dirs", (os.path.abspath(tempfile.gettempdir()),))
        values.setdefault("ranks", _parse_ranks("ranks", "auto"))
        return Config(**values)

    @property
    def own_dirs(self) -> tuple[str, ...]:
        """Those of `dirs` that this rank writes to."""
        return dealt(self.dirs, self.ranks)

    @property
    def own_host_budget(self) -> int:
        """This rank's share of `host_budget`, in bytes."""
        return self.host_budget // self.ranks.count

    @property
    def own_disk_limit(self) -> int:
        """The most bytes of this rank's file in a directory; 0 for no limit."""
        return max(1, self.disk_limit // in_a_directory(self.dirs, self.ranks)) if self.disk_limit else 0

    @property
    def own_dump(self) -> str:
        """Where this rank's dump goes: the graphs of all ranks have one name."""
        return self.dump if self.ranks.number is None or not self.dump else f"{self.dump}/rank{self.ranks.number}"

    def sharing(self) -> int:
        """How many ranks share the bandwidth of this one's drives, told by the file systems of the directories.

        Raises:
            OSError: a directory that is missing.
        """
        if self.engine == "memory" or self.ranks.count == 1:
            return self.ranks.count
        return on_a_drive(self.dirs, self.ranks, lambda path: os.stat(path).st_dev)

    def share(self) -> str:
        """What this rank has of its node, in a line; empty where it has all of it."""
        if self.ranks.count == 1:
            return ""
        own = f"writes to {', '.join(self.own_dirs)}, whose bandwidth {self.sharing()} ranks share"
        return f"{self.ranks}: {own}; host_budget {self.own_host_budget} B, disk_limit {self.own_disk_limit} B"

    def runtime_json(self) -> str:
        """The half that the runtime needs, as canonical JSON: it travels in the compiled graphs."""
        half = {"allow_tmpfs": self.allow_tmpfs, "dirs": list(self.own_dirs), "engine": self.engine}
        half |= {"inflight": self.inflight, "prefetch": self.prefetch, "checksums": self.checksums}
        half |= {"disk_limit": self.own_disk_limit, "host_budget": self.own_host_budget, "adapt": self.adapt}
        half |= {"compression": dict(self.compression)}
        half |= {"resident": self.budget if isinstance(self.budget, int) else 0}
        return json.dumps(half, sort_keys=True, separators=(",", ":"))


def _from_environment(name: str, value: str) -> Any:
    try:
        return _PARSERS[name](name, value)
    except ValueError as error:
        raise ValueError(f"SSD_FX_{name.upper()} in the environment: {error}") from None


def _known(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"{hint} The options are: {', '.join(names)}."


def _parse_dirs(name: str, value: object) -> tuple[str, ...]:
    """One path, several separated by the system's path separator, or a sequence of paths; made absolute."""
    if isinstance(value, (str, Path)):
        parts: list[Any] = str(value).split(os.pathsep)
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = []
    if not parts or not all(isinstance(p, (str, Path)) and str(p) for p in parts):
        raise ValueError(
            f"option {name}={value!r} is not a list of directories; right would be e.g. ['/mnt/nvme0', '/mnt/nvme1']"
        )
    return tuple(os.path.abspath(os.path.expanduser(p)) for p in parts)


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
    """`"fp8"`, `"host=bitpack,ssd=fp8"`, a mapping of tiers to codecs, or nothing."""
    given = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip() not in ("", "none", "off")]
        pairs = (part.rpartition("=") for part in parts)
        given = {tier or "ssd": codec for tier, _, codec in pairs}
    if given in (None, False):
        given = {}
    if not isinstance(given, Mapping) or not all(t in TIERS and c in CODECS for t, c in given.items()):
        raise ValueError(
            f"option {name}={value!r} is no compression; right would be one of {', '.join(map(repr, CODECS))}, or one "
            f"for each tier such as 'host=bitpack,ssd=fp8' (tiers: {', '.join(TIERS)})"
        )
    return tuple(sorted(given.items()))


def _parse_patterns(name: str, value: object) -> tuple[str, ...]:
    """One pattern, several separated by commas, or a sequence of patterns."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
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
    if str(value).lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError(f"option {name}={value!r} is neither true nor false")


def _parse_machine(name: str, value: object) -> str:
    """`"auto"`, `"default"`, or rates as a mapping or as JSON; these come back as canonical JSON."""
    if value in ("auto", "default"):
        return str(value)
    try:
        given = _json(value) if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise ValueError("no dictionary of rates")
        Machine.default(torch.device("cpu"), 1).with_rates(given)
    except ValueError as error:
        raise ValueError(
            f"option {name}={value!r} is no machine ({error}); "
            "right would be 'auto', 'default' or rates such as {\"flops\": 3e14, \"write_bw\": 6e9}"
        ) from None
    return json.dumps(dict(given), sort_keys=True)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _parse_ranks(name: str, value: object) -> Ranks:
    return parse_ranks(name, value, os.environ)


_PARSERS: dict[str, Any] = {
    "dirs": _parse_dirs,
    "budget": parse_budget,
    "recompute": _parse_flag,
    "min_bytes": parse_bytes,
    "engine": _parse_engine,
    "inner": _parse_choice("inductor", "aot_eager"),
    "inflight": parse_positive,
    "prefetch": parse_bytes,
    "dump": _parse_path,
    "allow_tmpfs": _parse_flag,
    "checksums": _parse_flag,
    "disk_limit": parse_bytes,
    "host_budget": parse_bytes,
    "compression": _parse_compression,
    "adapt": _parse_flag,
    "keep": _parse_patterns,
    "offload": _parse_patterns,
    "machine": _parse_machine,
    "profile": _parse_path,
    "ranks": _parse_ranks,
}
