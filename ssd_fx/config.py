"""Options from what the user says: `torch.compile(..., options={...})`, the environment (`SSD_FX_<NAME>`), or defaults.

Only this module reads options from the environment. `SSD_FX_ANY_TORCH` is no option (`versions.py`).
"""

from __future__ import annotations

import difflib
import json
import os
import pkgutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ssd_fx import versions
from ssd_fx.compat import list_options
from ssd_fx.options import TIERS, Options, noted
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.policy import Policy
from ssd_fx.ranks import parse_ranks
from ssd_fx.runtime.codec import CODECS
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.sizes import parse_budget, parse_bytes, parse_memory, parse_positive, parse_share, parse_tbw

_PREFIX = "SSD_FX_"


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    __doc__ = Options.__doc__

    @staticmethod
    def make(options: Mapping[str, Any] | None = None) -> Config:
        """Return the options of `options` and of the environment; the former win.

        Raises:
            ValueError: an unknown option, or a bad value; the message says what would be right.
        """
        names = [*noted()]
        for variable in os.environ:
            _check_variable(variable, names)
        if not isinstance(options or {}, Mapping):
            raise ValueError(f"options={options!r} is no dictionary of options such as {{'dirs': ['/mnt/nvme']}}")
        given = dict(options or {})
        for name in given:
            if name not in names:
                raise ValueError(f"ssd_fx has no option {name!r}{_known(str(name), names)}")
        values: dict[str, Any] = {}
        for name in names:
            if name in given:
                values[name] = _parsed(name, given[name])
            elif (variable := _PREFIX + name.upper()) in os.environ:
                try:
                    values[name] = _parsed(name, os.environ[variable])
                except ValueError as error:
                    raise ValueError(f"{variable} in the environment: {error}") from None
        _one_of_memory_and_budget(values, given)
        if "dirs" not in values:
            values["dirs"] = (os.path.abspath(tempfile.gettempdir()),)
        if "ranks" not in values:
            values["ranks"] = _parsed("ranks", "auto")
        return Config(**values)


def _check_variable(variable: str, names: list[str]) -> None:
    """Check that a variable of the environment that is called like an option is one that is read.

    Raises:
        ValueError: it begins as ours do, and there is no such option; or it is not in capitals.
    """
    right = variable.upper()
    option = right.removeprefix(_PREFIX).lower()
    if variable.startswith(_PREFIX) and variable != versions.ANYWAY and option not in names:
        raise ValueError(f"the environment has {variable}, and ssd_fx has no such option{_known(option, names)}")
    if right.startswith(_PREFIX) and variable != right and option in names:
        raise ValueError(f"the environment has {variable}, which is not in capitals; right would be {right}")


def _one_of_memory_and_budget(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Keep one of `memory` and `budget`; what is in `given` wins over the environment. Under `memory` the budget is 0.

    Raises:
        ValueError: both are in `given`, or both in the environment.
    """
    if "memory" not in values:
        return
    if "budget" in values and ("memory" in given) == ("budget" in given):
        raise ValueError(
            f"memory={values['memory']!r} and budget={values['budget']!r} are two answers to one question; right would "
            "be memory alone, for the peak of all tensors of the process, or budget alone, for the saved tensors "
            "that may stay"
        )
    if "budget" in given:
        del values["memory"]
    else:
        values["budget"] = 0


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


def _parse_choice(choices: Collection[str]) -> Callable[[str, object], str]:
    def parse(name: str, value: object) -> str:
        if value not in list(choices):
            right = ", ".join(map(repr, sorted(choices)))
            raise ValueError(f"option {name}={value!r} is unknown; right would be one of {right}")
        return str(value)

    return parse


def _parse_compression(name: str, value: object) -> tuple[tuple[str, str], ...]:
    """Pairs of tier and codec, of `"fp8"`, `"host=bitpack,ssd=fp8"`, a mapping of tiers to codecs, or nothing."""
    given = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip() not in ("", "none", "off")]
        codecs = {tier or "ssd": codec for tier, _, codec in (part.rpartition("=") for part in parts)}
        given = codecs if len(codecs) == len(parts) else value  # no mapping, so an error: a tier is named twice
    if given in (None, False):
        given = {}
    if not isinstance(given, Mapping) or not all(t in TIERS and c in list(CODECS) for t, c in given.items()):
        raise ValueError(
            f"option {name}={value!r} is no compression; right would be one of {', '.join(map(repr, CODECS))}, or one "
            f"for each tier such as 'host=bitpack,ssd=fp8' (tiers: {', '.join(sorted(TIERS))})"
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


def _parse_policy(name: str, value: object) -> Policy | None:
    """The policy of a function, or of a text that says where one is; None for nothing."""
    if value is None or value == "":
        return None
    try:
        function = pkgutil.resolve_name(value) if isinstance(value, str) else value
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"option {name}={value!r} names nothing that can be imported: {error}") from None
    if not callable(function):
        raise ValueError(
            f"option {name}={value!r} is no function; right would be one that takes an ssd_fx.SavedTensor, or its "
            "place such as 'package.module:function'"
        )
    if isinstance(function, type):
        of = function.__qualname__
        raise ValueError(f"option {name}={value!r} is a class; right would be an object of it, such as {of}(...)")
    return Policy.of(function)


def _parsed(name: str, value: object) -> Any:
    return _BY_KIND[noted()[name][0]](name, value)


_BY_KIND: dict[str, Callable[[str, object], Any]] = {
    "directories": _parse_dirs,
    "memory": parse_memory,
    "budget": parse_budget,
    "share": parse_share,
    "flag": _parse_flag,
    "size": parse_bytes,
    "size or auto": _parse_inflight,
    "limit": _parse_disk_limit,
    "terabytes": parse_tbw,
    "engine": _parse_choice(ENGINES),
    "compiler": _parse_choice({"inductor", "aot_eager"}),
    "path": _parse_path,
    "codecs": _parse_compression,
    "patterns": _parse_patterns,
    "function": _parse_policy,
    "machine": _parse_machine,
    "ranks": lambda name, value: parse_ranks(name, value, os.environ),
}
"""The function that reads an option, by the kind that `Options` notes of it."""
