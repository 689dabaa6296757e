"""The traffic of a compiled model of one's own, of the `plan.json` that the option `dump` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_fx.projection.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The plans of all graphs of one step, added up.

    layers: numbered modules such as `blocks.3`. layer_bytes: what the largest of them saves and offloads.
    step_s: predicted for the machine that made the plans, unless the user gives it.
    """

    graphs: tuple[str, ...]
    saved_bytes: int
    offloaded_bytes: int
    layers: int
    layer_bytes: int
    step_s: float
    step_is_predicted: bool

    @property
    def traffic(self) -> Traffic:
        """Of the whole step; the forward is taken as a third of it."""
        return Traffic(nbytes=self.offloaded_bytes, forward_s=self.step_s / 3, step_s=self.step_s)


def read(paths: Sequence[str], step_s: float | None = None) -> Compiled:
    """The plans in `paths`. step_s: seconds of forward and backward, instead of those predicted.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no plan, offloads nothing, or predicts no time while none is given.
    """
    plans = [_plan(path) for path in paths]
    predicted = [plan["predicted"].get("step_s", 0.0) for plan in plans]
    if step_s is None and not all(predicted):
        raise ValueError(f"--of {' '.join(paths)} predicts no time of a step; right would be to add --step-ms")
    layers = _layers(plans)
    found = Compiled(
        graphs=tuple(str(plan["graph"]) for plan in plans),
        saved_bytes=sum(plan["saved_bytes"] for plan in plans),
        offloaded_bytes=sum(plan["offloaded_bytes"] for plan in plans),
        layers=len(layers),
        layer_bytes=max(layers.values(), default=0),
        step_s=sum(predicted) if step_s is None else step_s,
        step_is_predicted=step_s is None,
    )
    if not found.offloaded_bytes:
        raise ValueError(f"--of {' '.join(paths)} offloads nothing; right would be a plan made with a smaller budget")
    return found


def _plan(path: str) -> dict[str, Any]:
    try:
        plan = json.loads(Path(path).read_text())
        used = {name: plan[name] for name in ("graph", "saved_bytes", "offloaded_bytes", "predicted")}
        names = ("module", "decision", "stored_nbytes")
        return used | {"groups": [{name: group[name] for name in names} for group in plan["groups"]]}
    except (ValueError, KeyError, TypeError):  # not JSON, or of something else
        right = "right would be a *.plan.json that the option dump has written"
        raise ValueError(f"--of {path} is no plan; {right}") from None


def _layers(plans: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Offloaded bytes by layer: the module's name up to its first number."""
    found: dict[str, int] = {}
    for plan in plans:
        for group in plan["groups"]:
            layer = _layer(group["module"])
            if layer and group["decision"].startswith("offload"):
                found[layer] = found.get(layer, 0) + group["stored_nbytes"]
    return found


def _layer(module: str) -> str:
    parts = module.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])
