"""The options that the runtime needs, which come as JSON in the arguments of the ops."""

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ssd_fx.runtime.codec import CODECS

TIERS = ("host", "ssd")


@dataclass(frozen=True, kw_only=True)  # no slots, so that the class has the defaults
class RuntimeConfig:
    """The options of a store. Sizes are in bytes. `ssd_fx.Config` takes its defaults from here.

    `dirs`: absolute directories for the files.
    `engine`: a name in `engines.registry.ENGINES`.
    `inflight`: the most that is being written at a time; 0 for what suits the device (`inflight.py`).
    `prefetch`: the most that is read before the graph asks, and not waited for yet.
    `allow_tmpfs`: accept a directory that is in RAM.
    `checksums`: sum every block when it is written, and verify it when it is read.
    `disk_limit`: the most that the file in one directory may hold; 0 for no limit but the file system's.
    `host_budget`: the most that stays in host memory before it moves on to disk.
    `compression`: pairs of a tier ("host", "ssd") and a codec.
    `resident`: the most that stays where it is, unwritten, over all graphs.
    `resident_at_most`: the limit to which the runtime may raise `resident` while the graph waits for the drive.
    `slowdown`: the share of a step that may be spent waiting before more is resident. Less than 0.02 counts as 0.02.
    `memory`: the limit of all tensors of the device: bytes, a share of what it has such as "0.9", or "auto", which is
        what it has and others leave; empty for none.
    `ranks`: the processes that share the memory of this node.
    `adapt`: stop writing tensors that somebody else holds anyway, and read earlier what the graph waited for.
    """

    dirs: tuple[str, ...] = ()
    engine: str = "auto"
    inflight: int = 0
    prefetch: int = 64 << 20
    allow_tmpfs: bool = False
    checksums: bool = True
    disk_limit: int = 0
    host_budget: int = 0
    compression: tuple[tuple[str, str], ...] = ()
    resident: int = 0
    resident_at_most: int = 0
    slowdown: float = 0.02
    memory: str = ""
    ranks: int = 1
    adapt: bool = True

    def __post_init__(self) -> None:
        relative = [path for path in self.dirs if not os.path.isabs(path)]
        if relative:
            raise ValueError(f"dirs must be absolute, because a process may change its directory: {relative}")
        if self.ranks <= 0:
            raise ValueError(f"ranks must be > 0, not {self.ranks}")
        for name in ("inflight", "prefetch", "disk_limit", "host_budget", "resident", "resident_at_most"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, not {getattr(self, name)}")
        for tier, codec in self.compression:
            if tier not in TIERS or codec not in CODECS:
                right = f"tiers are {list(TIERS)}, codecs {list(CODECS)}"
                raise ValueError(f"compression {codec!r} of tier {tier!r} is not known; {right}")


_TYPES: dict[str, type] = {field.name: type(field.default) for field in dataclasses.fields(RuntimeConfig)}
_TYPES |= {"dirs": list, "compression": dict}  # in JSON


def quoted(text: str) -> str:
    """`text` without quotes and backslashes, for generated code that does not escape them. `parse` reads it too."""
    return quote(text, safe="")


@functools.lru_cache(maxsize=256)
def parse(text: str) -> RuntimeConfig:
    """The configuration in the JSON object `text`, which may be `quoted`. Missing keys take their defaults.

    Raises: ValueError for what is no JSON object, for unknown keys and for values of the wrong type.
    """
    try:
        values = json.loads(unquote(text) if text.startswith("%") else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the config of an ssd_fx op is no JSON: {error}: {text!r}") from error
    if not isinstance(values, dict):
        raise ValueError(f"the config of an ssd_fx op must be a JSON object, not {text!r}")
    unknown = sorted(set(values) - set(_TYPES))
    if unknown:
        raise ValueError(f"unknown keys {unknown} in the config of an ssd_fx op; known are {list(_TYPES)}")
    for key, value in values.items():
        if type(value) is not _TYPES[key]:
            raise ValueError(f"{key} must be a {_TYPES[key].__name__}, not {value!r}")
    dirs = values.get("dirs", [])
    if not all(isinstance(path, str) for path in dirs):
        raise ValueError(f"dirs must be a list of strings, not {dirs!r}")
    compression = tuple(sorted(values.get("compression", {}).items()))
    return RuntimeConfig(**{**values, "dirs": tuple(dirs), "compression": compression})
