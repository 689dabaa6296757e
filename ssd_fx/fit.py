"""`ssd-fx fit script.py`: whether the model of a training script fits, and under which budget it trains fastest.

The script runs as ever, but large tensors have no data (`fake.FakeLarge`), up to the first backward behind a call of
what it compiles with ssd_fx. Each graph is planned where it would be compiled, and then runs as it is. At the backward
the script ends, and the graphs of the step are added up. What it prints goes to the standard error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ssd_fx import fake
from ssd_fx.backend import NO_BACKWARD, backend, check_options
from ssd_fx.estimate import (
    BUDGETS,
    Budget,
    Call,
    Look,
    estimate,
    parsed_batch,
    parsed_size,
    plans_for,
    survey,
    surveyed,
    tabulated,
    uncompiled,
    under_checkpoints,
)
from ssd_fx.passes.plan import Plan
from ssd_fx.projection.presets import DRIVES, MACHINES, Hardware, rates
from ssd_fx.refusal import refusing
from ssd_fx.report.budgets import Estimate
from ssd_fx.rivals import SHARES, kept, layers_of
from ssd_fx.runtime.errors import first_line
from ssd_fx.sizes import parse_budget, parse_tbw

USAGE = (
    "ssd-fx fit script.py [--budget 0,0.5,2GiB] [--batch 8,16] [--memory 8GiB] [--machine h100] [-- the script's own "
    "arguments]"
)
_EXAMPLES = """examples:
  ssd-fx fit train.py --memory 8GiB
  ssd-fx fit train.py --budget 0,0.5,2GiB --batch 8,16 -- --epochs 1
  ssd-fx fit train.py --machine 4090 --drive samsung-9100-pro-4tb --drives 2

exit status: 0 fine; 1 the script cannot be estimated; 2 nothing fits the memory, or wrong words.
"""
_BACKENDS = (backend, "ssd_fx")  # the values of torch.compile's `backend` that mean ours


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "fit",
        usage=USAGE,
        help="what a training script's step needs, for several budgets",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    said = "a Python script that compiles its model with ssd_fx.backend and trains it"
    parser.add_argument("script", type=os.path.expanduser, help=said)
    budgets = ",".join(map(str, BUDGETS))
    parser.add_argument("--budget", default=budgets, help="shares, sizes, auto; default %(default)s")
    parser.add_argument("--batch", help="other batch sizes than the script's")
    parser.add_argument("--memory", help="what the option `memory` would do, and what else fits, such as 8GiB")
    parser.add_argument(
        "--drive-tbw", default="0", help="how long drives last that are rated for so many TB, such as 600"
    )
    said = "plan for a GPU that is not here, in 16 bits, its memory and drives: "
    parser.add_argument("--machine", choices=MACHINES, metavar="NAME", help=said + ", ".join(MACHINES))
    said = "with --machine, other drives than the preset's: "
    parser.add_argument("--drive", choices=DRIVES, metavar="NAME", help=said + ", ".join(DRIVES))
    parser.add_argument("--drives", type=float, metavar="N", help="with --machine, how many drives a GPU has")
    said = "leave out what needs no drive: a checkpoint per layer, which takes one more trace, and PyTorch's budget"
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help=said)
    parser.add_argument("--json", action="store_true", help="print a list of estimates as JSON")
    parser.set_defaults(run=run)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the command, and those behind `--`, which are the script's."""
    words = list(argv)
    at = words.index("--") if words[:1] in (["fit"], ["explain"]) and "--" in words else len(words)
    return words[:at], words[at + 1 :]


def run(flags: argparse.Namespace) -> int:
    """Run the command, and return its exit status. `flags.behind`: the words behind `--`, which are the script's.

    0: fine. 1: the script or its model cannot be estimated. 2: no row fits the memory, or a wrong flag.
    """
    with refusing(2):
        budgets = tuple(parse_budget("budget", budget) for budget in flags.budget.split(","))
        batches = [parsed_batch(batch) for batch in flags.batch.split(",")] if flags.batch else [None]
        memory = parsed_size("memory", flags.memory)
        rated = parse_tbw("drive_tbw", flags.drive_tbw)
        there = _elsewhere(flags)
    options: Mapping[str, Any] = {}
    if there is not None:
        options = {"machine": rates(there.device, there.drives)}
        memory = memory or round(there.device.memory_gib * 2**30)
        rated = rated or there.drives.rated_tb
    look = partial(plans_for, budgets, SHARES if flags.rivals else ())
    with refusing(1):
        step = until_trained(flags.script, flags.behind, lambda gm: look, options)
        asked = {"budgets": budgets, "memory": memory, "drive_tbw": rated, "rivals": flags.rivals}
        found = [step.estimate(**asked) if batch is None else step.of_batch(batch, asked) for batch in batches]
    if flags.json:
        print(json.dumps([each.details() for each in found], indent=1))
    else:
        print(*([] if there is None else [_told(there)]), *found, sep="\n\n")
    return 0 if all(each.best for each in found) else 2


def _elsewhere(flags: argparse.Namespace) -> Hardware | None:
    """The machine that is asked for, with its drives; None for this one.

    Raises:
        ValueError: drives without a machine, or no possible number of them.
    """
    drive, count = flags.drive, flags.drives
    if flags.machine is None:
        for name, value in (("drive", drive), ("drives", count)):
            if value is not None:
                raise ValueError(f"--{name}={value} is of --machine; right would be both, or `ssd-fx calibrate` here")
        return None
    machine = MACHINES[flags.machine]
    own = machine.drives
    other = replace(own, drive=DRIVES[drive] if drive else own.drive, count=own.count if count is None else count)
    return replace(machine, drives=other)


def _told(machine: Hardware) -> str:
    rates_, drives = rates(machine.device, machine.drives), machine.drives
    return (
        f"planned for {machine.device.name}: {rates_['flops'] / 1e12:.0f} TFLOP/s in 16 bits, memory "
        f"{rates_['memory_bw'] / 1e9:.0f} GB/s;\n{drives.count:g} x {drives.drive.name}: write "
        f"{rates_['write_bw'] / 1e9:g} GB/s, read {rates_['read_bw'] / 1e9:g} GB/s; docs/projection.md has the sources"
    )


@dataclass(frozen=True)
class ModelCall:
    """A call of what is compiled with ssd_fx.

    settings: the arguments of `torch.compile`. runs: what was found of the graphs that it ran, in their order.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Mapping[str, Any]
    runs: tuple[Any, ...] = ()

    def surveyed(self, look: Look[Plan]) -> Plan:
        """What is found in the call's one joint graph, which is traced again."""
        call, settings = (self.args, self.kwargs), (self.settings.get(name) for name in ("options", "dynamic", "mode"))
        return surveyed(uncompiled(self.model), call, lambda gm: look, *settings)


@dataclass
class TrainingStep:
    """The first step of a script, up to its backward.

    calls: one that ran the same graphs as an earlier one is that one. models: all that was called, and the modules that
    were passed in. inputs: the storages that were there before the step. optimizers: those that were made before. note:
    how it ended, where that was not at a backward.
    """

    calls: list[ModelCall] = field(default_factory=list)
    models: dict[Callable[..., Any], None] = field(default_factory=dict)
    inputs: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    note: str = ""

    @property
    def runs(self) -> list[Any]:
        """What was found of each graph that ran, in their order."""
        return [run for call in self.calls for run in call.runs]

    def estimate(self, budgets: Sequence[Budget], memory: int | None, drive_tbw: float, rivals: bool) -> Estimate:
        """The table of the step: as `ssd_fx.estimate` of a call."""
        first = self.calls[0]
        config = check_options(first.settings.get("options"))
        if memory is None and isinstance(config.memory, int):
            memory = config.memory
        layers = layers_of(*self.models) if rivals else []
        beside = partial(under_checkpoints, layers, self._kept) if rivals else None
        inputs = sum(storage.nbytes() for storage in self.inputs.values())
        table = tabulated(budgets, memory, self.runs, inputs, self.optimizers, beside)
        return replace(
            table,
            batch=fake.batch_of((first.args, first.kwargs)),
            drive_tbw=(drive_tbw or config.drive_tbw) / config.ranks.count,  # the other ranks write to them too
            note="\n".join(filter(None, (table.note, self.note))),
        )

    def _kept(self) -> list[Plan]:
        """The plans with everything kept, of each call."""
        found = {id(call): call.surveyed(kept) for call in {id(call): call for call in self.calls}.values()}
        return [found[id(call)] for call in self.calls]

    def of_batch(self, batch: int, asked: dict[str, Any]) -> Estimate:
        """`ssd_fx.estimate` of the step with another batch size; `asked`: its arguments that are not the script's.

        Raises:
            ValueError: the step has several calls.
        """
        if len(self.calls) > 1:
            raise ValueError(
                f"batch={batch}: a step has {len(self.calls)} calls, which get their tensors from each other; right "
                "would be another batch size in the script"
            )
        (call,) = self.calls
        own: dict[str, Any] = {name: call.settings.get(name) for name in ("options", "dynamic", "mode")}
        return estimate(
            call.model, Call(call.args, call.kwargs), batch=batch, optimizers=self.optimizers, **own, **asked
        )


class _Ended(BaseException):
    """Ends a script, at a backward or for an error; no `except Exception` of the script may catch it.

    refused: the step cannot be told of for that error.
    """

    def __init__(self, error: Exception | None = None, *, refused: bool = False) -> None:
        super().__init__()
        self.error, self.refused = error, refused


class _Values(fake.FakeLarge):
    """As it is, and where the script wants the value of a tensor without data, it ends once `begun` says so."""

    def __init__(self, begun: Callable[[], bool]) -> None:
        super().__init__()
        self.begun = begun

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException as error:
            if self.begun():
                raise _Ended(error) from None
            raise


class _Script:
    """A running script: what it has compiled with ssd_fx, and its step.

    look: what looks at the joint graph of a Dynamo graph. options: go over those of the script.
    """

    def __init__(self, look: Callable[[fx.GraphModule], Look[Any]], options: Mapping[str, Any]) -> None:
        self.look, self.options = look, options
        self.compile: Callable[..., Any] = torch.compile
        self.compiled = self.called = self.looked = False
        self.step = TrainingStep()
        self.fake = _Values(lambda: self.called)
        self._looks = self._calls = False  # now
        self._runs: list[Any] = []  # of the call that runs now
        self._known: dict[tuple[int, ...], ModelCall] = {}  # by what was found of their graphs
        self._made: dict[int, torch.UntypedStorage] = {}  # that graphs have returned, without a gradient
        self._bound: dict[int, tuple[Any, Callable[..., Any]]] = {}  # what stands in for partials of our backend

    def stand_in(self, model: Any = None, **settings: Any) -> Any:
        """Stands in for `torch.compile`: what is compiled with ssd_fx is looked at when it is called to train."""
        ours = _ours(settings)
        if ours is None:
            return self.compile(model, **settings)
        if model is None:  # as a decorator
            return partial(self.stand_in, **settings)
        self.compiled = True
        made = self.compile(model, **settings | {"backend": self._backend(settings["backend"])})
        inner = made.forward if isinstance(model, nn.Module) else made
        ours["options"] = {**(ours.get("options") or {}), **self.options}

        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._calls or not torch.is_grad_enabled():
                return model(*args, **kwargs)
            return self._call(inner, ModelCall(model, args, kwargs, ours))

        if not isinstance(model, nn.Module):
            return functools.wraps(model)(called)
        made.forward = called
        return made

    def _backend(self, given: Any) -> Callable[..., Any]:
        """The same for the same backend: Dynamo shares graphs among blocks that are compiled alike."""
        if not isinstance(given, partial):
            return self._surveying
        return self._bound.setdefault(id(given), (given, partial(self._surveying, **given.keywords)))[1]

    def _surveying(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """A backend that looks at the graph, and leaves it as it is."""
        self._looks = self.looked = True
        try:
            found = survey(gm, inputs, self.look(gm), {**(options or {}), **self.options}, mode)
        except Exception as error:
            raise _Ended(error, refused=True) from None  # else Dynamo, or the script, takes it for one of the model
        finally:
            self._looks = False

        def run(*args: Any) -> Any:
            if found is not None:
                self._runs.append(found)
                self.step.inputs |= {at: each for at, each in _given(args).items() if at not in self._made}
            with self.fake:
                made = gm.forward(*args)
            self._made |= _given(made)
            return made

        return run

    def _call(self, compiled: Callable[..., Any], call: ModelCall) -> Any:
        """Run what is compiled, and note the call.

        Raises:
            _Ended: it fails behind a graph.
        """
        self.called = self._calls = True
        try:
            with _disable_current_modes():
                return compiled(*call.args, **call.kwargs)
        except Exception as error:
            if not self._runs:
                raise
            raise _Ended(error) from None
        finally:
            self._calls, runs, self._runs = False, tuple(self._runs), []
            if runs:
                self.step.calls.append(self._known.setdefault(tuple(map(id, runs)), replace(call, runs=runs)))
                passed = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, nn.Module)]
                self.step.models |= dict.fromkeys([uncompiled(call.model), *passed])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """`torch.compile` is `stand_in`, every new optimizer is noted, and a backward behind a call ends the script."""
        made = torch.optim.Optimizer.__init__

        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self.step.optimizers.append(optimizer)

        def ends(backward: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                if self.called and not self._looks:
                    raise _Ended
                return backward(*args, **kwargs)

            return called

        with (
            mock.patch.object(torch, "compile", self.stand_in),
            mock.patch.object(torch.optim.Optimizer, "__init__", noted),
            mock.patch.object(torch.autograd, "backward", ends(torch.autograd.backward)),
            mock.patch.object(torch.autograd, "grad", ends(torch.autograd.grad)),
            self.fake,
        ):
            yield


def _given(tensors: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors that no operator with a gradient has made, by their addresses."""
    given = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor) and x.grad_fn is None]
    storages = [x.untyped_storage() for x in given]
    return {each._cdata: each for each in storages}


def _ours(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of `torch.compile`, with those of a `functools.partial` of our backend; None if it is not ours."""
    backend, bound = settings.get("backend"), dict[str, Any]()
    if isinstance(backend, partial):
        bound, backend = backend.keywords, backend.func
    if backend not in _BACKENDS or settings.get("disable"):
        return None
    return settings | {name: value for name, value in bound.items() if not settings.get(name)}


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Within, all output goes to the standard error, that of other processes and libraries too."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)


def until_trained(
    path: str,
    arguments: Sequence[str],
    look: Callable[[fx.GraphModule], Look[Any]],
    options: Mapping[str, Any] | None = None,
) -> TrainingStep:
    """Run a script until the first backward of what it compiles with ssd_fx, and return its step.

    look: returns, for a Dynamo graph, what looks at its joint graph, and is pickled. options: go over the script's.

    Raises:
        ValueError: no script, it failed, or it has compiled nothing that trains.
        ValueError, OSError: what is raised by what looks.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path!r} is no file; right would be a Python script that trains")
    script = _Script(look, options or {})
    argv, folder = [path, *arguments], os.path.dirname(os.path.abspath(path))
    safe = getattr(sys.flags, "safe_path", False)  # Python puts no folder in front then; from 3.11 on
    torch._dynamo.reset()  # Dynamo compiles a function eight times at most
    failed: BaseException | None = None
    try:
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(sys, "path", [*sys.path] if safe else [folder, *sys.path[1:]]),
            _printing_to_stderr(),
            script.watched(),
        ):
            runpy.run_path(path, run_name="__main__")
        script.step.note = "the script ended without a backward, and all its calls to train count as one step"
    except _Ended as ended:
        if ended.refused and isinstance(ended.error, (ValueError, OSError)):
            raise ended.error from None
        if ended.error is not None:
            failed = ended.error.with_traceback(ended.__traceback__)  # which has the line of the script
            if ended.refused:
                raise ValueError(_failed(path, failed)) from None
    except (Exception, SystemExit) as error:
        failed = error
    finally:
        torch._dynamo.reset()
    return _told_step(path, script, failed)


def _told_step(path: str, script: _Script, failed: BaseException | None) -> TrainingStep:
    """The step of a script that has run; `failed`: the error that it ended with.

    Raises:
        ValueError: it has none.
    """
    if not script.step.calls:
        if failed is not None:
            raise ValueError(_failed(path, failed)) from None
        if script.looked:
            raise ValueError(NO_BACKWARD)
        if script.called:
            raise ValueError(
                f"torch.compile compiles nothing of what {path} calls to train: of model.compile() it leaves out "
                "modules of torch itself, such as nn.Sequential; right would be torch.compile(model) of these"
            )
        if script.compiled:
            raise ValueError(
                f"{path} never called its compiled model outside torch.no_grad(); right would be to train it"
            )
        raise ValueError(
            f"{path} compiled no model with ssd_fx; right would be torch.compile(model, backend=ssd_fx.backend) in it"
        )
    if failed is not None:
        said = f"status {failed.code!r}" if isinstance(failed, SystemExit) else _said(failed)
        script.step.note = f"the step ends at {_line(path, failed)}, before a backward: {said}"
    return script.step


def _failed(path: str, error: BaseException) -> str:
    """One line with the error, and the line of the script that it came from."""
    where = _line(path, error)
    if isinstance(error, SystemExit):
        return f"{where} ended before it trained, with status {error.code!r}; its arguments go behind `--`"
    return (
        f"{where} failed before it trained: {_said(error)}; right would be a script that gets to its first step "
        "without the values of large tensors, which have none here"
    )


def _line(path: str, error: BaseException) -> str:
    """The line of the script that an error came from: `train.py:12`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(path)]
    return f"{path}:{own[-1]}" if own else path


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
