"""What people want to know of the plans behind the graphs that run: names, places, predictions.

A graph may come from a compile cache. So it brings its plan along as packed JSON, the argument `about` of `begin_`. The
plan stays packed until somebody asks. The plans of a configuration are dropped with its last graph (`graphs.py`). Their
keys are the fields of `GraphReport` (`ssd_fx/report/model.py`), and the runtime reads slot, module, source and name of
its `rows`.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssd_fx.options import Options
from ssd_fx.runtime.config import parse


@dataclass(slots=True)
class _Noted:
    """A plan, packed. `places`: the module and source line of each slot, once somebody asked."""

    config: str
    about: str
    places: dict[int, str] | None = None


_noted: dict[str, _Noted] = {}
"""By graph."""


def pack(described: Mapping[str, Any]) -> str:
    """A plan as text of letters, digits, `-`, `_` and `=`, about a tenth as long as its JSON."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(described, separators=(",", ":")).encode(), 9)).decode()


def unpack(about: str) -> dict[str, Any]:
    """The plan that `pack` made this text of.

    Raises: ValueError if `about` is no packed plan.
    """
    try:
        found = json.loads(zlib.decompress(base64.urlsafe_b64decode(about.encode())))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{about[:20]!r} is no packed plan") from error
    if not isinstance(found, dict):
        raise ValueError(f"{about[:20]!r} is no packed plan")
    return found


def note(graph: str, config: str, about: str) -> None:
    """Takes the plan of a graph that runs. Each forward calls it, so it does no more than compare."""
    found = _noted.get(graph)
    if found is None or found.about != about or found.config != config:
        _noted[graph] = _Noted(config, about)


def packed() -> dict[str, str]:
    """The plans of the graphs that ran, packed, by graph."""
    return {graph: found.about for graph, found in dict(_noted).items()}


def forget(config: Options) -> None:
    """Drops the plans of a configuration whose graphs are gone."""
    for graph, found in list(_noted.items()):
        if parse(found.config) == config:
            _noted.pop(graph, None)


def where(graph: str, slot: int) -> str:
    """The module and source line of an alias group, such as `blocks.0.mlp gpt.py:57`; empty if they are not known."""
    found = _noted.get(graph)
    if found is None:
        return ""
    if found.places is None:
        groups = unpack(found.about).get("rows", ())
        found.places = {g["slot"]: " ".join(filter(None, (g["module"], g["source"] or g["name"]))) for g in groups}
    return found.places.get(slot, "")
