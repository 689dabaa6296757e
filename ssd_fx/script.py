"""Runs a training script up to its first backward, with large tensors that have no data (`fake.FakeLarge`).

Each graph of what it compiles with ssd_fx is looked at where it would be compiled, and then runs as it is. The script
ends at the first backward after a call that trains. What it prints goes to the standard error.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from ssd_fx import fake
from ssd_fx.backend import NO_BACKWARD, backend
from ssd_fx.compat import DataDependentOutputException, _disable_current_modes, tree_leaves
from ssd_fx.runtime.errors import first_line
from ssd_fx.runtime.memory.gauge import storages
from ssd_fx.runtime.stats import SKIPPED
from ssd_fx.survey import Look, ModelCall, TrainingStep, survey

_Options = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_BACKENDS = (backend, "ssd_fx")  # the values of torch.compile's `backend` that mean ours


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the argument of a command that names a script."""
    said = "a Python script that compiles its model with ssd_fx.backend and trains it"
    parser.add_argument("script", type=os.path.expanduser, help=said)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line, and those behind the `--` of a command about a script, which are the script's."""
    words = list(argv)
    at = words.index("--") if words[:1] in (["fit"], ["explain"]) and "--" in words else len(words)
    return words[:at], words[at + 1 :]


class _Ended(BaseException):
    """Ends a script, at a backward or for an error; no `except Exception` of the script may catch it.

    refused: because of `error`, nothing can be said of the step.
    """

    def __init__(self, error: Exception | None = None, *, refused: bool = False) -> None:
        super().__init__()
        self.error, self.refused = error, refused


class _Values(fake.FakeLarge):
    """Like `FakeLarge`, but ends the script if it wants the value of a tensor without data and `begun()` is true."""

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

    look: returns for a Dynamo graph the function that looks at its joint graph. options: returns the options to plan
    for, of the script's.
    """

    def __init__(self, look: Callable[[fx.GraphModule], Look[Any]], options: _Options) -> None:
        self.look, self.options = look, options
        self.compile: Callable[..., Any] = torch.compile
        self.compiled = self.called = self.looked = False
        self.trained = False  # a backward came without a call of what is compiled with ssd_fx
        self.step = TrainingStep()
        self.fake = _Values(lambda: self.called)
        self._looks = self._calls = False  # whether a graph is looked at now, and whether compiled code is called now
        self._runs: list[Any] = []  # what was found of each graph of the call that runs now
        self._known: dict[tuple[int, ...], ModelCall] = {}  # by what was found of their graphs
        self._made: dict[int, torch.UntypedStorage] = {}  # storages that graphs have returned, without a gradient
        self._others = _storages("cpu")  # storages of this process from before the script
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
        try:
            ours["options"] = self.options(ours.get("options") or {})
        except ValueError as error:
            raise _Ended(error, refused=True) from None

        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._calls or not torch.is_grad_enabled():
                return model(*args, **kwargs)
            return self._call(inner, ModelCall(model, args, kwargs, ours))

        if not isinstance(model, nn.Module):
            return functools.wraps(model)(called)
        made.forward = called
        return made

    def _backend(self, given: Any) -> Callable[..., Any]:
        """What stands in for a backend, one for each: Dynamo shares graphs among blocks that are compiled alike."""
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
            found = survey(gm, inputs, self.look(gm), self.options(options or {}), mode)
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
            _Ended: it fails after a graph has run.
        """
        if not self.called:
            there = _storages(call.device.type)
            self.step.there = {at: storage for at, storage in there.items() if at not in self._others}
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
                self.step.models |= call.models

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
                self.trained |= not self.called
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


def _storages(device_type: str) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors of the process on such a device, with and without data."""
    return storages(fake.PLAIN, device_type)


def _given(tensors: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of the tensors that no operator with a gradient has made, by their addresses."""
    given = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor) and x.grad_fn is None]
    return {each._cdata: each for each in (x.untyped_storage() for x in given)}


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
    options: _Options = dict,
) -> TrainingStep:
    """Run a script until the first backward of what it compiles with ssd_fx, and return its step.

    look: returns for a Dynamo graph the function that looks at its joint graph, which is pickled. options: returns the
    options to plan for, of the script's.

    Raises:
        ValueError: no script, it failed, or it has compiled nothing that trains.
        ValueError, OSError: what the function raises that looks.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path!r} is no file; right would be a Python script that trains")
    script = _Script(look, options)
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
        if failed is not None and not (script.trained and not script.compiled):
            raise ValueError(_failed(path, failed)) from None
        if script.looked:
            raise ValueError(NO_BACKWARD)
        if script.called:
            raise ValueError(f"torch.compile compiles nothing of what {path} calls to train. It skips {SKIPPED}")
        if script.compiled:
            raise ValueError(
                f"{path} never called its compiled model outside torch.no_grad(); right would be to train it"
            )
        until = "" if failed is None else f", and trains until {_line(path, failed)} without it"
        raise ValueError(
            f"{path} compiled no model with ssd_fx{until}; right would be torch.compile(model, "
            "backend=ssd_fx.backend) in it"
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
