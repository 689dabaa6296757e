"""The traffic of a compiled model of one's own, of the `plan.json` that the option `dump` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_fx.projection.checks import positive
from ssd_fx.projection.traffic import Traffic
from ssd_fx.report.rows import layer_of

_MOST_BYTES = 2**62
_KINDS = {str: "a text", int: "a whole number of bytes", float: "a number from 0 on", dict: "an object", list: "a list"}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The plans of all graphs of one step, added up.

    written_bytes: what goes to the drives in a step. The rest of offloaded_bytes is in host memory, or stays in memory
    under a budget in bytes.
    layers: numbered modules such as `blocks.3`. layer_bytes: what the largest of them saves and offloads.
    step_s: predicted for the machine that made the plans, unless the user gives it.
    """

    graphs: tuple[str, ...]
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    layers: int
    layer_bytes: int
    step_s: float
    step_is_predicted: bool

    @property
    def traffic(self) -> Traffic:
        """Of the whole step; the forward is taken as a third of it."""
        return Traffic(nbytes=self.written_bytes, forward_s=self.step_s / 3, step_s=self.step_s)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is read of one plan. stays_bytes: what the runtime may keep in memory of all that the graphs write."""

    graph: str
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    stays_bytes: int
    step_s: float
    layers: Mapping[object, int]


def read(paths: Sequence[str], step_s: float | None = None) -> Compiled:
    """The plans in `paths`. step_s: seconds of forward and backward, instead of those predicted.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no plan, writes nothing to the drives, or predicts no time while none is given.
    """
    plans, given = [_plan(path) for path in paths], f"--of {' '.join(paths)}"
    if step_s is None:
        if not all(plan.step_s for plan in plans):
            raise ValueError(f"{given} predicts no time of a step; right would be to add --step-ms")
        positive(f"{given}: step_s", sum(plan.step_s for plan in plans), "seconds")
    layers = _added([plan.layers for plan in plans])
    stays = max(plan.stays_bytes for plan in plans)  # the budget is one for all graphs
    found = Compiled(
        graphs=tuple(plan.graph for plan in plans),
        saved_bytes=sum(plan.saved_bytes for plan in plans),
        offloaded_bytes=sum(plan.offloaded_bytes for plan in plans),
        written_bytes=max(sum(plan.written_bytes for plan in plans) - stays, 0),
        layers=len(layers),
        layer_bytes=max(layers.values(), default=0),
        step_s=sum(plan.step_s for plan in plans) if step_s is None else step_s,
        step_is_predicted=step_s is None,
    )
    if not found.offloaded_bytes:
        raise ValueError(f"{given} offloads nothing; right would be a plan made with a smaller budget")
    if not found.written_bytes:
        raise ValueError(f"{given} writes nothing to drives: all stays in memory; right would be a smaller budget")
    return found


def _plan(path: str) -> _Plan:
    try:
        plan = json.loads(Path(path).read_text())
        if not isinstance(plan, dict):
            raise ValueError("it holds no object")
        return _parsed(plan)
    except ValueError as error:
        right = "right would be a *.plan.json that the option dump has written"
        raise ValueError(f"--of {path} is no plan: {error}; {right}") from None


def _parsed(plan: Mapping[str, Any]) -> _Plan:
    predicted, offloaded = _value(plan, "predicted", dict), _value(plan, "offloaded_bytes", int)
    kept = [name for name in ("shared_budget_bytes", "resident_bytes") if name in predicted]
    written = _value(predicted, "written_bytes", int) if "written_bytes" in predicted else offloaded
    return _Plan(
        graph=_value(plan, "graph", str),
        saved_bytes=_value(plan, "saved_bytes", int),
        offloaded_bytes=offloaded,
        written_bytes=written,
        stays_bytes=sum(_value(predicted, name, int) for name in kept),
        step_s=_value(predicted, "step_s", float) if "step_s" in predicted else 0.0,
        layers=_added([_layer(group) for group in _value(plan, "groups", list)]),
    )


def _layer(group: Any) -> Mapping[object, int]:
    """The bytes of an offloaded group by its layer; nothing for one that is kept or of no layer."""
    if not isinstance(group, dict):
        raise ValueError(f"groups has {group!r}, and not an object")
    layer, nbytes = layer_of(_value(group, "module", str)), _value(group, "stored_nbytes", int)
    offloaded = _value(group, "decision", str).startswith("offload")
    return {layer: nbytes} if layer and offloaded else {}


def _value(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """Raises:
    ValueError: `values` has no `name`, or one of another type, negative, or beyond what can be.
    """
    if name not in values:
        raise ValueError(f"it has no {name}")
    value = values[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    possible = number and 0 <= value <= _MOST_BYTES and (kind is float or value == int(value))
    if not (possible if kind in (int, float) else isinstance(value, kind)):
        raise ValueError(f"{name}={str(value)[:40]}, and not {_KINDS[kind]}")
    return value


def _added(parts: Sequence[Mapping[object, int]]) -> dict[object, int]:
    found: dict[object, int] = {}
    for part in parts:
        for layer, nbytes in part.items():
            found[layer] = found.get(layer, 0) + nbytes
    return found
