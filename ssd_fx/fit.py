"""`ssd-fx fit script.py`: whether the model of a training script fits, and under which budget it trains fastest.

The script runs as ever, but large tensors have no data (`fake.FakeLarge`), up to the first call of the model that it
compiles with ssd_fx. There the model is estimated, and the script ends. What it prints goes to the standard error.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ssd_fx.backend import backend
from ssd_fx.estimate import BUDGETS, Call, estimate, parsed_batch, parsed_size
from ssd_fx.fake import FakeLarge
from ssd_fx.projection.presets import DRIVES, MACHINES, Machine, rates
from ssd_fx.refusal import refusing
from ssd_fx.report.budgets import Estimate
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
        budgets = flags.budget.split(",")
        for budget in budgets:
            parse_budget("budget", budget)
        batches = [parsed_batch(batch) for batch in flags.batch.split(",")] if flags.batch else [None]
        parsed_size("memory", flags.memory)
        rated = parse_tbw("drive_tbw", flags.drive_tbw)
        there = _elsewhere(flags)
    asked = {"budgets": budgets, "memory": flags.memory, "drive_tbw": rated, "rivals": flags.rivals}
    if there is not None:
        asked["memory"] = flags.memory or round(there.device.memory_gib * 2**30)
        asked["drive_tbw"] = rated or there.drives.rated_tb
    with refusing(1):
        found = until_trained(
            flags.script, flags.behind, lambda step: [step.estimate(batch, asked, there) for batch in batches]
        )
    if flags.json:
        print(json.dumps([each.details() for each in found], indent=1))
    else:
        print(*([] if there is None else [_told(there)]), *found, sep="\n\n")
    return 0 if all(each.best for each in found) else 2


def _elsewhere(flags: argparse.Namespace) -> Machine | None:
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


def _told(machine: Machine) -> str:
    rates_, drives = rates(machine.device, machine.drives), machine.drives
    return (
        f"planned for {machine.device.name}: {rates_['flops'] / 1e12:.0f} TFLOP/s in 16 bits, memory "
        f"{rates_['memory_bw'] / 1e9:.0f} GB/s;\n{drives.count:g} x {drives.drive.name}: write "
        f"{rates_['write_bw'] / 1e9:g} GB/s, read {rates_['read_bw'] / 1e9:g} GB/s; docs/projection.md has the sources"
    )


@dataclass(frozen=True)
class TrainingStep:
    """The first call of a compiled model: its arguments, those of `torch.compile`, and the optimizers made before."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: dict[str, Any]
    optimizers: Sequence[torch.optim.Optimizer]

    def estimate(self, batch: int | None, asked: dict[str, Any], there: Machine | None = None) -> Estimate:
        """`ssd_fx.estimate` of the step; `asked`: its arguments that are not the script's. `there`: another machine."""
        own: dict[str, Any] = {name: self.settings.get(name) for name in ("options", "dynamic", "mode")}
        if there is not None:
            own["options"] = dict(own["options"] or {}) | {"machine": rates(there.device, there.drives)}
        inputs = Call(self.args, self.kwargs)
        return estimate(self.model, inputs, batch=batch, optimizers=self.optimizers, **own, **asked)


Answer = Any
Ask = Callable[[TrainingStep], Answer]


class _Ended(BaseException):
    """Ends a script with the answer, or why there is none; no `except Exception` of the script may catch it."""

    def __init__(self, answer: Answer | Exception) -> None:
        super().__init__()
        self.answer = answer


@dataclass
class _Script:
    """A running script: what it has compiled with ssd_fx, and its optimizers."""

    ask: Ask
    compile: Callable[..., Any] = torch.compile
    compiled: list[Any] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def stand_in(self, model: Any = None, **settings: Any) -> Any:
        """Stands in for `torch.compile`: what is compiled with ssd_fx ends the script when it is called to train."""
        ours = _ours(settings)
        if ours is None:
            return self.compile(model, **settings)
        if model is None:  # as a decorator
            return functools.partial(self.stand_in, **settings)
        self.compiled.append(model)

        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return model(*args, **kwargs)
            self.end(TrainingStep(model, args, kwargs, ours, self.optimizers))

        if not isinstance(model, nn.Module):
            return functools.wraps(model)(called)
        made = self.compile(model, backend="eager")  # with the attributes of a compiled module
        made.forward = called
        return made

    def end(self, step: TrainingStep) -> None:
        """Raises:
        _Ended: always.
        """
        try:
            with _disable_current_modes():
                answer: Any = self._answer(step)
        except Exception as error:
            answer = error
        raise _Ended(answer)

    def _answer(self, step: TrainingStep) -> Answer:
        if len(self.compiled) > 1:
            raise ValueError(
                f"the script compiles {len(self.compiled)} models or blocks with ssd_fx, and a step of several graphs "
                "is not estimated; right would be, for this command, one torch.compile of the whole model; "
                "ssd_fx.report() after some steps adds up all graphs as they are"
            )
        return self.ask(step)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """`torch.compile` is `stand_in`, and every new optimizer is noted."""
        made = torch.optim.Optimizer.__init__

        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self.optimizers.append(optimizer)

        with (
            mock.patch.object(torch, "compile", self.stand_in),
            mock.patch.object(torch.optim.Optimizer, "__init__", noted),
        ):
            yield


def _ours(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of `torch.compile`, with those of a `functools.partial` of our backend; None if it is not ours."""
    backend, bound = settings.get("backend"), dict[str, Any]()
    if isinstance(backend, functools.partial):
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


def until_trained(path: str, arguments: Sequence[str], ask: Ask) -> Answer:
    """Run a script until it calls the model that it has compiled with ssd_fx; return what `ask` says of that call.

    Raises:
        ValueError: no script, it failed, or it has compiled nothing or several things; and what `ask` raises.
        OSError: what `ask` raises.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path!r} is no file; right would be a Python script that trains")
    script = _Script(ask)
    argv, folder = [path, *arguments], os.path.dirname(os.path.abspath(path))
    safe = getattr(sys.flags, "safe_path", False)  # Python puts no folder in front then; from 3.11 on
    try:
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(sys, "path", [*sys.path] if safe else [folder, *sys.path[1:]]),
            _printing_to_stderr(),
            script.watched(),
            FakeLarge(),
        ):
            runpy.run_path(path, run_name="__main__")
    except _Ended as ended:
        if not isinstance(ended.answer, Exception):
            return ended.answer
        if isinstance(ended.answer, (ValueError, OSError)):
            raise ended.answer from None
        raise ValueError(_failed(path, ended.answer)) from None
    except (Exception, SystemExit) as error:
        raise ValueError(_failed(path, error)) from None
    if script.compiled:
        raise ValueError(f"{path} never called its compiled model outside torch.no_grad(); right would be to train it")
    raise ValueError(
        f"{path} compiled no model with ssd_fx; right would be torch.compile(model, backend=ssd_fx.backend) in it"
    )


def _failed(path: str, error: BaseException) -> str:
    """One line with the error, and the line of the script that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(path)]
    where = f"{path}:{own[-1]}" if own else path
    if isinstance(error, SystemExit):
        return f"{where} ended before it trained, with status {error.code!r}; its arguments go behind `--`"
    return (
        f"{where} failed before it trained: {type(error).__name__}: {first_line(error)}; right would be a script that "
        "gets to its first step without the values of large tensors, which have none here"
    )
