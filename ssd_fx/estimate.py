"""What a training step would need under each of several budgets, without running it.

    joint graph -> cut and analysed once -> a plan for every budget --------+-> the table
              '---> cut under PyTorch's budget -> everything kept ----------+
    the same with a checkpoint around each layer -> everything kept --------'

`survey.py` gets the joint graph, on tensors without data. A step may run several graphs (`ssd-fx fit` finds them):
their forwards one after the other, and then their backwards in the reverse order.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ssd_fx import fake
from ssd_fx.backend import check_options
from ssd_fx.config import Config
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.plan import Keep, Plan, replay_of
from ssd_fx.passes.proposals import cut, decide_for_all
from ssd_fx.report.budgets import MEMORY, Estimate, Prediction
from ssd_fx.report.figures import highest, left_behind, still_leaving
from ssd_fx.report.limit import Before, Optimizers, Parts, optimizers_of, parts
from ssd_fx.report.model import WITHIN
from ssd_fx.rivals import CHECKPOINT, SHARES, budgeted, checkpointed, kept, kept_under, layers_of
from ssd_fx.runtime.account import AUTO, limit_of
from ssd_fx.runtime.errors import first_line
from ssd_fx.runtime.memory.gauge import Gauge, gauge
from ssd_fx.sizes import parse_budget, parse_bytes, parse_tbw
from ssd_fx.survey import Look, ModelCall, TrainingStep, uncompiled

Budget = int | float | str
BUDGETS: tuple[Budget, ...] = (0, "auto", 0.25, 0.5, 0.75, 1.0)


def estimate(
    model: Callable[..., Any],
    inputs: object,
    *,
    budgets: Budget | Iterable[Budget] = BUDGETS,
    options: Mapping[str, Any] | None = None,
    memory: int | str | None = None,
    drive_tbw: float = 0.0,
    batch: int | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    dynamic: bool | None = None,
    mode: str | None = None,
    rivals: bool = True,
) -> Estimate:
    """Return what a training step of `model` would need under each of the `budgets`. Nothing runs::

        print(ssd_fx.estimate(model, (tokens, targets), memory="8GiB"))

    Args:
        model: real, of FakeTensors or on the device "meta"; without data it may be larger than the machine.
        inputs: a tensor, a sequence of positional arguments, or a mapping of keyword arguments.
        budgets: each as the option `budget`; one of them or several.
        options: those of `ssd_fx.Config`; `dynamic` and `mode` are those of `torch.compile`.
        memory: a size such as "8GiB". The table then has a row for the option `memory`, and says which rows fit. None:
            that of the options, if there is one.
        drive_tbw: a number of TB that all drives of the node are rated for; 0 for that of the options.
        batch: another batch size than that of the inputs. It has to be their first size.
        optimizers: one or several, whose state counts.
        rivals: also predict ways that need no drive: a checkpoint around each layer of the model, and PyTorch's
            `activation_memory_budget`. The checkpoints take one more trace of `model`, which is as before afterwards.

    It calls `torch._dynamo.reset()`, so what the process compiled before is compiled again when it runs next.

    Raises:
        ValueError, OSError: what `check_options` raises, a budget or a size that is none, and a budget that is too
            small for the model.
        ValueError: the model does not compile as one graph with a backward.
    """
    asked = Asked.of([budgets] if isinstance(budgets, (int, float, str)) else budgets, memory, drive_tbw, rivals=rivals)
    check_options(options)
    made = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    size = None if batch is None else parsed_batch(batch)
    settings = {"options": options, "dynamic": dynamic, "mode": mode}
    return of_call(ModelCall(model, *called_with(inputs), settings), asked, size, made)


def of_call(
    call: ModelCall,
    asked: Asked,
    batch: int | None,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    others: int = 0,
    note: str = "",
) -> Estimate:
    """The table of a step that is one call of a model. `optimizers`, `others`: as in `Asked.table`. `note`: how the
    step ended."""
    model, given = fake.off_meta(uncompiled(call.model), (call.args, call.kwargs))
    if batch is not None:
        given = fake.with_batch(given, batch)
    call = replace(call, model=model, args=given[0], kwargs=given[1])
    found = call.found(asked.look)
    step = TrainingStep([replace(call, runs=(found,))], call.models, note=note)
    return asked.table(step, found.parts.input_bytes, optimizers, others)


@dataclass(frozen=True)
class Asked:
    """What a table is to say. memory: a limit in bytes; None for that of the options. drive_tbw: 0 for theirs.

    whole: the bytes that the device has, if it is not here. It is the limit where there is no other.
    """

    budgets: tuple[Budget, ...]
    memory: int | None = None
    drive_tbw: float = 0.0
    rivals: bool = True
    whole: int = 0

    @staticmethod
    def of(budgets: Iterable[Budget], memory: int | str | None, drive_tbw: object, *, rivals: bool) -> Asked:
        """Reads the arguments of `estimate`. Raises: ValueError: a budget or a size that is none, or no budget."""
        parsed = tuple(parse_budget("budget", budget) for budget in budgets)
        if not parsed:
            raise ValueError("budgets is empty; right would be e.g. [0, 0.5]")
        return Asked(parsed, parsed_size("memory", memory), parse_tbw("drive_tbw", drive_tbw), rivals)

    @property
    def look(self) -> Look[Found]:
        """Finds in a joint graph what the table needs."""
        return partial(plans_for, self.budgets, SHARES if self.rivals else ())

    def table(
        self,
        step: TrainingStep,
        input_bytes: int,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        others: int,
    ) -> Estimate:
        """What the step would need, beside parameters, buffers and inputs of so many bytes.

        optimizers: those whose state counts; None if there will be one. others: bytes of all other tensors.
        """
        first, runs = step.calls[0], step.runs
        config = check_options(first.settings.get("options"))
        memory, uncounted = self._limit(config, first.device)
        own_state = sum(fake.nbytes_of(list(each.state.values())) for each in optimizers or ())
        gradients = [run.parts.trained_bytes for run in runs]
        trained = min(input_bytes, sum(gradients))
        before = Before(input_bytes, trained, input_bytes + own_state + others, _known(optimizers))
        beside = _Beside(before.total_bytes, [min(nbytes, input_bytes) for nbytes in left_behind(gradients)])
        rows = tuple(_prediction(each, [run.plans[i] for run in runs], beside) for i, each in enumerate(self.budgets))
        if memory is not None:
            rows += _within(memory, [run.lowest for run in runs], beside)
        rivals, note = _rivals(step, beside) if self.rivals else ((), "")
        batch = fake.batch_of((first.args, first.kwargs))
        counts = Counter(run.own.graph for run in runs)
        highest = max(runs, key=lambda run: replay_of(run.lowest).peak)
        return Estimate(
            ", ".join(graph + (f" x {times}" if times > 1 else "") for graph, times in counts.items()),
            batch,
            sum(run.own.saved_bytes for run in runs),
            input_bytes,
            own_state + before.state_bytes,
            rows,
            other_bytes=others,
            state_guessed=before.optimizers is None,
            memory=memory,
            drive_tbw=(self.drive_tbw or config.drive_tbw) / config.ranks.count,  # the other ranks write to them too
            rates=" and ".join(dict.fromkeys(run.rates for run in runs)),
            rivals=rivals,
            note="\n".join(filter(None, (note, uncounted, step.note))),
            largest=highest.parts.largest,
        )

    def _limit(self, config: Config, device: torch.device) -> tuple[int | None, str]:
        """The limit of memory in bytes, and a note if that of the options cannot be told here."""
        own = self.memory or config.memory or float(self.whole > 0)
        if isinstance(own, int):
            return own, ""
        if not own:
            return None, ""
        if self.whole:
            return int(self.whole * (AUTO if own == "auto" else float(own))), ""
        counts = _gauge(config, device)
        if counts is None:
            return None, f"memory={own!r} is no limit here, for nothing counts the tensors of {device.type}"
        return limit_of(own, config.ranks.count, counts, device), ""


def _gauge(config: Config, device: torch.device) -> Gauge | None:
    """What would count the tensors of a training process with these options, if that is here."""
    if device.type == "cpu":
        return gauge(device) if config.cpu_allocator else None
    if not torch.get_device_module(device).is_available():
        return None
    torch.empty(0, device=device)  # PyTorch counts nothing before the first tensor
    return gauge(device)


def _known(optimizers: Sequence[torch.optim.Optimizer] | None) -> Optimizers | None:
    """What is known of the optimizers. Warns of each whose state is guessed."""
    found = None if optimizers is None else optimizers_of(optimizers) or Optimizers("", 0, 0)
    for name, why in () if found is None else found.guessed.items():
        text = f"the state of {name} is taken to be as large as that of Adam, for {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return found


def _rivals(step: TrainingStep, beside: _Beside) -> tuple[tuple[Prediction, ...], str]:
    """The predictions of ways that need no drive, and a note about them."""
    plans, note = _under_checkpoints(step, layers_of(*step.models))
    first = [_prediction(CHECKPOINT, plans, beside)] if plans else []
    shares = [_prediction(budgeted(s), [run.alone[i] for run in step.runs], beside) for i, s in enumerate(SHARES)]
    return (*first, *(row for row in shares if not any(other.dominates(row) for other in shares))), note


def _under_checkpoints(step: TrainingStep, layers: Sequence[nn.Module]) -> tuple[Sequence[Plan], str]:
    """The plans of a step with a checkpoint around each of the `layers`, and what to note: why there are none, or what
    a layer is."""
    if not layers:
        return (), f"no row of a {CHECKPOINT}: no ModuleList or Sequential of the model has two layers of one class"
    try:
        with checkpointed(layers):
            plans = step.found(kept)
    except Exception as error:  # anything: the model's own code, in a way in which it may never have run
        said = f"{type(error).__name__}: {first_line(error)}"
        return (), f"no row of a {CHECKPOINT}: {type(layers[0]).__name__} cannot be traced under one ({said})"
    return plans, f"a {CHECKPOINT} is one around each of {len(layers)} {type(layers[0]).__name__}"


def parsed_size(name: str, value: int | str | None) -> int | None:
    """The bytes of a size; None for None.

    Raises:
        ValueError: no size above 0, or a number without a unit below a MiB, which is hardly meant as bytes.
    """
    if value is None:
        return None
    nbytes, bare = parse_bytes(name, value), str(value).strip()
    if not nbytes:
        raise ValueError(f"{name}={value!r} is nothing; right would be e.g. '8GiB'")
    if nbytes < 2**20 and re.fullmatch(r"[\d.]+", bare):
        raise ValueError(f"{name}={value!r} has no unit; right would be e.g. {bare + 'GiB'!r}")
    return nbytes


def parsed_batch(value: int | str) -> int:
    """A batch size.

    Raises:
        ValueError: no number above 0.
    """
    if not re.fullmatch(r"\s*0*[1-9]\d*\s*", str(value)):
        raise ValueError(f"batch={value!r} is no batch size; right would be a number above 0, such as 8")
    return int(value)


@dataclass(frozen=True)
class Found:
    """The plans of one graph. `own`: what the analyses found in PyTorch's partition. `plans`: one for every budget.
    `alone`: with everything kept, one for every share of PyTorch's budget.

    `lowest`: the plan for budget 0. `parts`: what that needs. `rates`: as in `Estimate`.
    """

    own: Plan
    plans: tuple[Plan, ...]
    lowest: Plan
    parts: Parts
    alone: tuple[Plan, ...]
    rates: str


def plans_for(budgets: Sequence[Budget], shares: Sequence[float], joint: Joint, options: PlanOptions) -> Found:
    """Plan the joint graph for every budget and for budget 0, and for every share of PyTorch's budget."""
    alone = tuple(kept_under(share, joint, options) for share in shares)
    own = cut(joint, options)
    asked = list(dict.fromkeys([*budgets, 0]))
    found = decide_for_all(joint, own, options, asked)
    plans = tuple(found[asked.index(budget)][1] for budget in budgets)
    partition, lowest = found[asked.index(0)]
    return Found(own.plan, plans, lowest, parts(partition, lowest, options.roots), alone, options.source)


def _within(memory: int, lowest: Sequence[Plan], beside: _Beside) -> tuple[Prediction, ...]:
    """The row of the option `memory`, made of the plans for budget 0; nothing if not even those fit.

    Tensors that fill what the plans leave of the limit `memory` stay in memory and are not written. Where all have
    room, none is written. The cost of transfers falls in proportion.
    """
    room = memory - beside.there
    found, row = [replay_of(plan) for plan in lowest], _prediction(MEMORY, lowest, beside)
    everything = highest([each.step.everything for each in found], [plan.saved_bytes for plan in lowest], beside.behind)
    most = max(everything, row.peak_bytes)
    stays = min(room, most) - row.peak_bytes
    if stays < 0:
        return ()
    share = _leaving(lowest, stays) if room < most else 0.0
    saved = (1 - share) * (row.stall_s + math.fsum(each.transfer_s for each in found))
    peak = row.peak_bytes + stays
    return (
        replace(
            row,
            peak_bytes=peak,
            memory_bytes=peak + beside.there,
            step_s=row.step_s - saved,
            stall_s=share * row.stall_s,
            written_bytes=round(share * sum(each.written for each in found)),
            limit_bytes=room,
        ),
    )


def _leaving(plans: Sequence[Plan], stays: int) -> float:
    """`still_leaving` of what the plans offload, if `stays` bytes stay beside what `Limits` lets stay."""
    limits = plans[-1].limits
    moved = sum(int(g.nbytes) for plan in plans for g in plan.offloaded if not plan.schedule[g.slot].is_later)
    return still_leaving(moved, limits.shared + limits.resident + stays)


def called_with(inputs: object) -> tuple[Any, Any]:
    """Positional and keyword arguments.

    Raises:
        ValueError: neither a tensor, a sequence nor a mapping.
    """
    match inputs:
        case torch.Tensor():
            return (inputs,), {}
        case Mapping():
            return (), dict(inputs)
        case tuple() | list():
            return tuple(inputs), {}
    raise ValueError(
        f"inputs={inputs!r} are no inputs; right would be a tensor, a tuple of the model's arguments, or a dictionary "
        "of its keyword arguments"
    )


def _must_stay(plan: Plan) -> int:
    """Bytes that a forward leaves in memory under any budget, until its backward begins."""
    kept = {slot: decision.reason for slot, decision in plan.decisions.items() if isinstance(decision, Keep)}
    return sum(int(group.nbytes) for group in plan.groups if kept.get(group.slot, WITHIN) != WITHIN)


@dataclass(frozen=True)
class _Beside:
    """What is in memory beside the graphs of a step. there: bytes that live before it. behind: as `left_behind`."""

    there: int
    behind: Sequence[int]


def _prediction(budget: Budget, plans: Sequence[Plan], beside: _Beside) -> Prediction:
    """What is predicted of a step that runs graphs with these plans.

    While a graph runs, what the graphs before it leave in memory is there as well. A budget in bytes only raises the
    limit of a plan. It is the runtime that lets so many bytes stay, unwritten: those stored last, over all graphs.
    """
    found = [replay_of(plan) for plan in plans]
    last, behind = plans[-1].limits, beside.behind
    stays, saved = ([getattr(p, name) for p in plans] for name in ("kept_bytes", "saved_bytes"))
    peak = highest([each.peak for each in found], stays, behind)
    limit = highest([int(plan.limits.memory) for plan in plans], stays, behind)
    everything = highest([each.step.everything for each in found], saved, behind)
    filled = limit if last.shared else peak  # the runtime fills a budget in bytes
    whole = max(peak, min(filled + last.resident, everything))
    return Prediction(
        budget=budget,
        peak_bytes=whole,
        memory_bytes=whole + beside.there,
        step_s=math.fsum(each.seconds for each in found),
        compute_s=math.fsum(each.compute_s for each in found),
        stall_s=math.fsum(each.stall_s for each in found),
        written_bytes=round(_leaving(plans, 0) * sum(each.written for each in found)),
        floor_bytes=highest([each.step.floor for each in found], map(_must_stay, plans), behind),
        limit_bytes=limit,
    )
