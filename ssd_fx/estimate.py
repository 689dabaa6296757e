"""What a training step would need under each of several budgets, without running it.

    model, inputs -> Dynamo -> joint graph -> cut and analysed once -> a plan for every budget ---------+-> the table
                            '-------------> cut under PyTorch's budget -> everything kept --------------+
    the same with a checkpoint around each layer -> Dynamo -> joint graph -> cut -> everything kept ----'

Everything up to the plans is what `backend` does with the same options, on tensors without data. Then it ends: nothing
is compiled, and nothing runs. A step may run several graphs (`ssd-fx fit` finds them): their forwards one after the
other, and then their backwards in the reverse order.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.exc import Unsupported

from ssd_fx import fake
from ssd_fx.backend import NoBackward, check_options, compile_graph
from ssd_fx.passes.cost.kernels import hint
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition, nodes_by_storage, tensor_of
from ssd_fx.passes.plan import Plan, replay_of
from ssd_fx.passes.proposals import cut, decide_for_all
from ssd_fx.report.budgets import MEMORY, Estimate, Prediction
from ssd_fx.report.limit import largest_at
from ssd_fx.rivals import CHECKPOINT, SHARES, budgeted, checkpointed, kept, kept_under, layers_of
from ssd_fx.runtime.errors import first_line
from ssd_fx.sizes import parse_budget, parse_positive, parse_tbw

Budget = int | float | str
BUDGETS: tuple[Budget, ...] = (0, "auto", 0.25, 0.5, 0.75, 1.0)
T = TypeVar("T")
Look = Callable[[Joint, PlanOptions], T]
_SILENT = "ignore_logger_methods"  # of Dynamo: what is not called, and breaks no graph; an alias from torch 2.13 on


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
        memory: as the option, in bytes ("8GiB"): a row of what it would do, and what else fits. None for that of the
            options.
        drive_tbw: a number of TB that all drives of the node are rated for; 0 for that of the options.
        batch: another batch size than that of the inputs, if they have it first.
        optimizers: one or several, whose state counts.
        rivals: predict what needs no drive, too: a checkpoint around each layer of the model, and PyTorch's
            `activation_memory_budget`. The first traces the model once more. `model` is as before in the end.

    It calls `torch._dynamo.reset()`, so what the process compiled before is compiled again when it runs next.

    Raises:
        ValueError, OSError: what `check_options` raises, a budget or a size that is none, and a budget that is too
            small for the model.
        ValueError: the model does not compile as one graph with a backward.
    """
    several = [budgets] if isinstance(budgets, (int, float, str)) else budgets
    asked = tuple(parse_budget("budget", budget) for budget in several)
    if not asked:
        raise ValueError("budgets is empty; right would be e.g. [0, 0.5]")
    limit, rated = parsed_size("memory", memory), parse_tbw("drive_tbw", drive_tbw)
    config = check_options(options)
    if limit is None and isinstance(config.memory, int):
        limit = config.memory
    rated = (rated or config.drive_tbw) / config.ranks.count  # the other ranks write to them too
    model, call = fake.off_meta(uncompiled(model), called_with(inputs))
    if batch is not None:
        call = fake.with_batch(call, parsed_batch(batch))
    survey = partial(_survey_of, model, call, options, dynamic, mode)
    found = survey(partial(plans_for, asked, SHARES if rivals else ()))
    made = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    layers = layers_of(model) if rivals else []
    beside = partial(under_checkpoints, layers, lambda: [survey(kept)]) if rivals else None
    table = tabulated(asked, limit, [found], found.input_bytes, made, beside)
    return replace(table, batch=fake.batch_of(call), drive_tbw=rated)


def tabulated(
    budgets: Sequence[Budget],
    memory: int | None,
    runs: Sequence[Found],
    input_bytes: int,
    optimizers: Sequence[torch.optim.Optimizer],
    beside: Callable[[], tuple[Sequence[Plan], str]] | None,
) -> Estimate:
    """The table of a step that runs these graphs, one after the other.

    memory: the option, in bytes. input_bytes: of parameters, buffers and inputs of the step. beside: the plans of the
    same step with a checkpoint around each layer, none if there are no such, and what to note about them; None without
    rivals.
    """
    state = sum(map(_state_bytes, optimizers))
    there = input_bytes + state
    rows = tuple(_prediction(budget, [run.plans[i] for run in runs], there) for i, budget in enumerate(budgets))
    if memory is not None:
        rows += _within(memory - there, [run.lowest for run in runs], there)
    others: tuple[Prediction, ...] = ()
    note = ""
    if beside is not None:
        plans, note = beside()
        first = [_prediction(CHECKPOINT, plans, there)] if plans else []
        shares = [_prediction(budgeted(s), [run.alone[i] for run in runs], there) for i, s in enumerate(SHARES)]
        others = (*first, *(row for row in shares if not any(other.dominates(row) for other in shares)))
    saved = sum(run.own.saved_bytes for run in runs)
    counts = Counter(run.own.graph for run in runs)
    name = ", ".join(graph + (f" x {times}" if times > 1 else "") for graph, times in counts.items())
    rates = " and ".join(dict.fromkeys(run.rates for run in runs))
    highest = max(runs, key=lambda run: replay_of(run.lowest).peak)
    more: dict[str, Any] = {"rates": rates, "rivals": others, "note": note, "largest": highest.largest}
    return Estimate(name, None, saved, input_bytes, state, rows, memory=memory, **more)


def under_checkpoints(layers: Sequence[nn.Module], survey: Callable[[], Sequence[Plan]]) -> tuple[Sequence[Plan], str]:
    """The plans of a step with a checkpoint around each of the `layers`, and what to note: why there are none, or what
    a layer is."""
    if not layers:
        return (), f"no row of a {CHECKPOINT}: no ModuleList or Sequential of the model has two layers of one class"
    try:
        with checkpointed(layers):
            plans = survey()
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
    nbytes, bare = parse_positive(name, value), str(value).strip()
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
    """Of one graph: `own`: what the analyses found in PyTorch's partition; `plans`: one for every budget; `alone`: with
    everything kept, one for every share of PyTorch's budget.

    `lowest`: the plan for budget 0. `largest`: the largest tensor at its peak. `rates`: as in `Estimate`.
    """

    own: Plan
    input_bytes: int
    plans: tuple[Plan, ...]
    lowest: Plan
    alone: tuple[Plan, ...]
    rates: str
    largest: str


def plans_for(budgets: Sequence[Budget], shares: Sequence[float], joint: Joint, options: PlanOptions) -> Found:
    """Plan the joint graph for every budget and for budget 0, and for every share of PyTorch's budget."""
    alone = tuple(kept_under(share, joint, options) for share in shares)
    own = cut(joint, options)
    asked = list(dict.fromkeys([*budgets, 0]))
    found = decide_for_all(joint, own, options, asked)
    plans = tuple(found[asked.index(budget)][1] for budget in budgets)
    partition, lowest = found[asked.index(0)]
    largest = largest_at(partition, replay_of(lowest).peak_node, options.roots)
    input_bytes = _input_bytes(own.partition)
    return Found(own.plan, input_bytes, plans, lowest, alone, options.rates, largest)


def _within(room: int, lowest: Sequence[Plan], there: int) -> tuple[Prediction, ...]:
    """What the option `memory` makes of the plans for budget 0; nothing if not even those fit.

    `room`: of the limit, above the level before the step, where there are `there` bytes. What the plans leave of it
    stays in memory and is not written, and what that would cost is saved in proportion.
    """
    found, row = [replay_of(plan) for plan in lowest], _prediction(MEMORY, lowest, there)
    everything = _highest([plan.saved_bytes for plan in lowest], [each.step.everything for each in found])
    stays = min(room, max(everything, row.peak_bytes)) - row.peak_bytes
    if stays < 0:
        return ()
    written = max(0, row.written_bytes - stays)
    share = written / row.written_bytes if row.written_bytes else 0.0
    saved = (1 - share) * (row.stall_s + math.fsum(each.transfer_s for each in found))
    peak = row.peak_bytes + stays
    return (
        replace(
            row,
            peak_bytes=peak,
            memory_bytes=peak + there,
            step_s=row.step_s - saved,
            stall_s=share * row.stall_s,
            written_bytes=written,
            limit_bytes=room,
        ),
    )


def _survey_of(
    model: Callable[..., Any],
    call: tuple[Any, Any],
    options: Mapping[str, Any] | None,
    dynamic: bool | None,
    mode: str | None,
    look: Look[T],
) -> T:
    return surveyed(model, call, lambda _: look, options, dynamic, mode)


def survey(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], look: Look[T], options: Mapping[str, Any], mode: str | None
) -> T | None:
    """What is found in the joint graph of a Dynamo graph; None if it has no backward. As a backend calls it.

    Raises:
        ValueError: nothing of the graph may be offloaded; and what is raised by what looks.
    """
    try:
        with suppress(NoBackward):
            compile_graph(gm, inputs, options=options, survey=partial(_survey, look), mode=mode)
    except _Surveyed as ended:
        found: T = ended.found
        return found
    return None


class _Surveyed(BaseException):
    """Ends the compilation with what was found. Dynamo takes every `Exception` for a failure of the backend."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


def _survey(look: Look[T], joint: Joint, options: PlanOptions, keeps_all: bool) -> NoReturn:
    """Raises:
    _Surveyed: always, with what `look` finds, unless there is an error.
    ValueError: the graph is one of several, or nothing of it may be offloaded.
    """
    if joint.is_nested:
        raise ValueError(
            "the model has regions that compile to graphs of their own (torch.compiler.nested_compile_region), and a "
            "step of several graphs is not estimated; right would be the model without them"
        )
    if keeps_all:
        raise ValueError(
            "nothing is offloaded under torch.utils.checkpoint or saved_tensors_hooks around the compiled code, or "
            "where it computes on several streams, so all budgets are alike; right would be the model without them"
        )
    raise _Surveyed(look(joint, options))


def uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What the user wrote, of the result of `torch.compile`, or of what `Module.compile` hands to it."""
    if getattr(model, "__func__", None) is torch.nn.Module._call_impl:
        return model.__self__  # type: ignore[attr-defined, no-any-return]
    return getattr(model, "_orig_mod", model)


def surveyed(
    model: Callable[..., Any],
    call: tuple[Any, Any],
    look: Callable[[fx.GraphModule], Look[T]],
    options: Mapping[str, Any] | None,
    dynamic: bool | None,
    mode: str | None,
) -> T:
    """What is found in a model's one joint graph. Nothing is compiled, and nothing runs.

    `look` returns, for the Dynamo graph, what looks at the joint graph. That is pickled: see `compile_graph`.

    Raises:
        ValueError: the model does not compile as one graph with a backward; and what is raised by what looks.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], **given: Any) -> Any:
        return compile_graph(gm, inputs, survey=partial(_survey, look(gm)), mode=mode, **given)

    args, kwargs = call
    silent = getattr(torch._dynamo.config, _SILENT)
    torch._dynamo.reset()  # Dynamo compiles a function eight times at most
    compiled = torch.compile(model, backend=backend, options=dict(options or {}), dynamic=dynamic, fullgraph=True)
    try:
        with _not_in_place(model), torch._dynamo.config.patch({_SILENT: silent | _logging()}):
            compiled(*args, **kwargs)
    except _Surveyed as ended:
        found: T = ended.found
        return found
    except Unsupported as error:
        raise ValueError(_broken(model, error)) from None
    except ValueError as error:  # to which Dynamo may have added lines
        raise ValueError(first_line(error)) from None
    finally:
        torch._dynamo.reset()
    raise ValueError(
        f"torch.compile finds no tensors to compile in {name_of(model)}; right would be a model that trains"
    )


@contextmanager
def _not_in_place(model: Callable[..., Any]) -> Iterator[None]:
    """Within, no module of the model calls what `Module.compile` has made of it, as if that had not been called."""
    with ExitStack() as stack:
        for each in model.modules() if isinstance(model, nn.Module) else ():
            if each._compiled_call_impl is not None:
                stack.enter_context(mock.patch.object(each, "_compiled_call_impl", None))
        yield


def _logging() -> set[Callable[..., Any]]:
    """What only tells people something. Libraries add methods to loggers, so they are looked up late."""
    return {print, *(each for each in vars(logging.Logger).values() if callable(each))}


def _broken(model: Callable[..., Any], error: Unsupported) -> str:
    """Why there is more than one graph, in one line."""
    where = [f"{frame.filename}:{frame.lineno}" for frame in (error.real_stack or ())[-1:]]
    at = f" ({where[0]})" if where else ""
    return (
        f"{name_of(model)} does not compile as one graph, and a step of several graphs is not estimated: "
        f"{first_line(error)}{at}; right would be a model for torch.compile(fullgraph=True), or ssd_fx.explain, which "
        "has the plan of every graph"
    )


def name_of(model: Callable[..., Any]) -> str:
    """A function by its name, a module by that of its class."""
    return getattr(model, "__qualname__", type(model).__name__)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state; 0, with a warning, if it cannot tell them before its first step."""
    try:
        return fake.state_bytes(optimizer)
    except Exception as error:  # anything: it is the optimizer's own code, on tensors without data
        said = f"{type(error).__name__}: {first_line(error)}"
        text = f"the state of {type(optimizer).__name__} counts 0 bytes, for its step needs data ({said})"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return 0


@dataclass(frozen=True)
class Call:
    """The arguments of a call, where a sequence of inputs or a mapping would hold one kind only."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def called_with(inputs: object) -> tuple[Any, Any]:
    """Positional and keyword arguments.

    Raises:
        ValueError: neither a tensor, a sequence, a mapping nor a `Call`.
    """
    match inputs:
        case Call(args, kwargs):
            return args, dict(kwargs)
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


def _input_bytes(partition: Partition) -> int:
    """Bytes of all storages that the forward gets: parameters, buffers and inputs."""
    owners = nodes_by_storage(partition.forward.graph.find_nodes(op="placeholder")).values()
    tensors = [tensor for nodes in owners if (tensor := tensor_of(nodes[0])) is not None]
    return sum(int(hint(tensor.untyped_storage().nbytes())) for tensor in tensors)


def _prediction(budget: Budget, plans: Sequence[Plan], beside: int) -> Prediction:
    """What is predicted of a step that runs graphs with these plans. `beside`: bytes that are there before the step.

    While a graph runs, what those before it leave in memory is there as well. A budget in bytes is no part of a plan,
    which is one under a limit that is higher by so much. The runtime lets so many bytes of what was stored last stay
    over all graphs, unwritten.
    """
    found = [replay_of(plan) for plan in plans]
    last = plans[-1].limits
    stays, saved = ([getattr(p, name) for p in plans] for name in ("kept_bytes", "saved_bytes"))
    peak = _highest(stays, [each.peak for each in found])
    limit = _highest(stays, [int(plan.limits.memory) for plan in plans])
    everything = _highest(saved, [each.step.everything for each in found])
    filled = limit if last.shared else peak  # the runtime fills a budget in bytes
    whole = max(peak, min(filled + last.resident, everything))
    return Prediction(
        budget=budget,
        peak_bytes=whole,
        memory_bytes=whole + beside,
        step_s=math.fsum(each.seconds for each in found),
        compute_s=math.fsum(each.compute_s for each in found),
        stall_s=math.fsum(each.write_stall_s + each.read_stall_s for each in found),
        written_bytes=max(sum(each.written for each in found) - last.shared - last.resident, 0),
        floor_bytes=_highest(stays, [replay_of(plan.origin).step.floor for plan in plans]),
        limit_bytes=limit,
    )


def _highest(stays: Sequence[int], peaks: Sequence[int]) -> int:
    """The highest of the `peaks` of graphs, each above what those before it leave in memory."""
    levels = itertools.accumulate(stays, initial=0)
    return max(level + peak for level, peak in zip(levels, peaks, strict=False))
