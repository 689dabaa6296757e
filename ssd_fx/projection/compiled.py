"""The traffic of a compiled model of one's own, of the `plan.json` that the option `dump` writes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd_fx.projection.checks import positive, whole
from ssd_fx.projection.formulas import StepIO
from ssd_fx.report.figures import may_stay
from ssd_fx.report.rows import layer_of


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The plans of all graphs of one step, added up. A graph that a step runs several times counts as often (`runs`).

    written_bytes: what goes to the drives in a step. The rest of offloaded_bytes is in host memory, or stays in memory
    under a budget in bytes.
    layers: numbered modules such as `blocks.3`. layer_bytes: what the largest of them saves and offloads.
    step_s: predicted for the machine that made the plans, unless the user gives it.
    """

    graphs: tuple[str, ...]
    runs: tuple[int, ...]
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    layers: int
    layer_bytes: int
    step_s: float
    step_is_predicted: bool

    @property
    def traffic(self) -> StepIO:
        """Of the whole step; the forward is taken as a third of it."""
        return StepIO(nbytes=self.written_bytes, forward_s=self.step_s / 3, step_s=self.step_s)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is read of one plan. stays_bytes: what the runtime may keep in memory of all that the graphs write."""

    graph: str
    saved_bytes: int
    offloaded_bytes: int
    written_bytes: int
    stays_bytes: int
    step_s: float
    layers: Counter[object]


def read(paths: Sequence[str], step_s: float | None = None, runs: Sequence[int] = (1,)) -> Compiled:
    """The plans in `paths`. step_s: seconds of forward and backward, instead of those predicted.

    runs: how often a step runs the graphs, one number for all or one for each.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is no plan, writes nothing to the drives, or predicts no possible time while none is given.
            It is named twice, or the numbers of runs do not fit.
    """
    given = f"--of {' '.join(paths)}"
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ValueError(f"{given} names a plan twice; right would be once, with --runs for how often a step runs it")
    for number in runs:
        whole("runs", number)
    if len(runs) not in (1, len(paths)):
        right = "right would be one for all, or one for each"
        raise ValueError(f"--runs {' '.join(map(str, runs))} has {len(runs)} numbers for {len(paths)} plans; {right}")
    plans, counts = [_plan(path) for path in paths], runs if len(runs) > 1 else [*runs] * len(paths)

    def total(name: str) -> Any:
        return sum(number * getattr(plan, name) for plan, number in zip(plans, counts, strict=True))

    if step_s is None:
        positive(f"{given}: step_s", total("step_s"), "seconds")
    layers = Counter[object]()
    for plan in plans:
        layers.update(plan.layers)
    stays = max(plan.stays_bytes for plan in plans)  # the budget is one for all graphs
    found = Compiled(
        graphs=tuple(plan.graph for plan in plans),
        runs=tuple(counts),
        saved_bytes=total("saved_bytes"),
        offloaded_bytes=total("offloaded_bytes"),
        written_bytes=max(total("written_bytes") - stays, 0),
        layers=len(layers),
        layer_bytes=max(layers.values(), default=0),
        step_s=total("step_s") if step_s is None else step_s,
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
        predicted, layers = plan["predicted"], Counter[object]()
        for group in plan["groups"]:
            layer = layer_of(group["module"])
            if layer and group["decision"].startswith("offload"):
                layers[layer] += int(group["stored_nbytes"])
        return _Plan(
            graph=plan["graph"],
            saved_bytes=int(plan["saved_bytes"]),
            offloaded_bytes=int(plan["offloaded_bytes"]),
            written_bytes=int(predicted["written_bytes"]),
            stays_bytes=may_stay([predicted]),
            step_s=float(predicted["step_s"]),
            layers=layers,
        )
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else error
        right = "right would be a *.plan.json that the option dump has written"
        raise ValueError(f"--of {path} is no plan ({said}); {right}") from None
