"""The options that the runtime obeys, which come as JSON in the arguments of the ops (`Options.runtime_json`)."""

import functools
import json
from dataclasses import fields
from typing import Any
from urllib.parse import quote, unquote

from ssd_fx.options import RUNTIME, TIERS, Options, noted
from ssd_fx.ranks import Ranks
from ssd_fx.runtime.codec import CODECS

_KNOWN = [name for name, notes in noted().items() if RUNTIME in notes]
_TYPES: dict[str, Any] = {f.name: type(f.default) for f in fields(Options)}
_TYPES |= {"dirs": list, "compression": dict, "ranks": int}  # in JSON
_OR_NUMBERS = ("budget", "inflight", "memory")  # "auto" or a number


def quoted(text: str) -> str:
    """`text` without quotes and backslashes, for generated code that does not escape them. `parse` reads it too."""
    return quote(text, safe="")


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Options:
    """The options in the JSON object `text`, which may be `quoted`.

    Missing keys take their defaults, but for the budget: without one nothing stays.

    Raises: ValueError for what is no JSON object, for unknown keys and for values of the wrong type.
    """
    try:
        values = json.loads(unquote(text) if text.startswith("%") else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the config of an ssd_fx op is no JSON: {error}: {text!r}") from error
    if not isinstance(values, dict):
        raise ValueError(f"the config of an ssd_fx op must be a JSON object, not {text!r}")
    unknown = sorted(set(values) - set(_KNOWN))
    if unknown:
        raise ValueError(f"unknown keys {unknown} in the config of an ssd_fx op; known are {_KNOWN}")
    given: dict[str, Any] = {"budget": 0} | {key: _checked(key, value) for key, value in values.items()}
    return Options(**given)


def _checked(key: str, value: Any) -> Any:
    """The option `key`, of a value in JSON.

    Raises: ValueError if it is none.
    """
    if key in _OR_NUMBERS:
        if value != "auto" and type(value) not in (int, float):
            raise ValueError(f"{key} must be a number or 'auto', not {value!r}")
        return value
    if type(value) is not _TYPES[key]:
        raise ValueError(f"{key} must be a {_TYPES[key].__name__}, not {value!r}")
    if key == "dirs":
        if not all(isinstance(path, str) for path in value):
            raise ValueError(f"dirs must be a list of strings, not {value!r}")
        return tuple(value)
    if key == "compression":
        for tier, codec in value.items():
            if tier not in TIERS or codec not in CODECS:
                right = f"tiers are {sorted(TIERS)}, codecs {list(CODECS)}"
                raise ValueError(f"compression {codec!r} of tier {tier!r} is not known; {right}")
        return tuple(sorted(value.items()))
    return Ranks(count=value) if key == "ranks" else value
