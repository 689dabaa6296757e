"""Looks at joint graphs without compiling or running anything.

    model, inputs -> Dynamo -> graph -> AOTAutograd -> joint graph -> what looks at it -> the end of the compilation

Up to the joint graph everything is as `backend` does it with the same options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
from torch import fx, nn

from ssd_fx.backend import NoBackward, compile_graph, device_of
from ssd_fx.compat import Unsupported, tree_leaves, uncalled
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.runtime.errors import first_line

T = TypeVar("T")
Look = Callable[[Joint, PlanOptions], T]
"""Looks at a joint graph. It is pickled: see `compile_graph`."""


@dataclass(frozen=True)
class ModelCall:
    """A call of a model that trains.

    settings: the arguments of `torch.compile`. runs: what was found of the graphs that it ran, in their order.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Mapping[str, Any]
    runs: tuple[Any, ...] = ()

    @property
    def models(self) -> dict[Callable[..., Any], None]:
        """The model, and the modules that are passed to it."""
        passed = [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, nn.Module)]
        return dict.fromkeys([uncompiled(self.model), *passed])

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        own = [p for model in self.models if isinstance(model, nn.Module) for p in model.parameters()]
        return device_of([*own, *tree_leaves((self.args, self.kwargs))])

    def found(self, look: Look[T]) -> T:
        """What `look` finds in the model's one graph, which is traced once more. Raises: as `surveyed`."""
        chosen = {name: self.settings.get(name) for name in ("options", "dynamic", "mode")}
        return surveyed(uncompiled(self.model), (self.args, self.kwargs), look, **chosen)


@dataclass
class TrainingStep:
    """A step up to its backward.

    calls: a call that ran the same graphs as an earlier one is the same object. models: all that were called, and the
    modules that were passed to them. inputs: the storages that its graphs got and did not make. there: all storages on
    the device before the first call. optimizers: those that were made. note: how it ended, if not at a backward.
    """

    calls: list[ModelCall] = field(default_factory=list)
    models: dict[Callable[..., Any], None] = field(default_factory=dict)
    inputs: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    there: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    note: str = ""

    @property
    def runs(self) -> list[Any]:
        """What was found of each graph that ran, in their order."""
        return [run for call in self.calls for run in call.runs]

    def found(self, look: Look[T]) -> list[T]:
        """What `look` finds in the one graph of each call. It is traced once more, for equal calls together."""
        traced = {at: call.found(look) for at, call in {id(call): call for call in self.calls}.items()}
        return [traced[id(call)] for call in self.calls]

    @property
    def other_bytes(self) -> int:
        """The bytes that the script had before the step, beside the inputs and the state of optimizers."""
        state = tree_leaves([list(each.state.values()) for each in self.optimizers])
        owned = self.inputs | {x.untyped_storage()._cdata: x for x in state if isinstance(x, torch.Tensor)}
        return sum(storage.nbytes() for at, storage in self.there.items() if at not in owned)


def surveyed(
    model: Callable[..., Any],
    call: tuple[Any, Any],
    look: Look[T],
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    mode: str | None = None,
) -> T:
    """What `look` finds in a model's one joint graph. Nothing is compiled, and nothing runs.

    `call`: positional and keyword arguments. `options`: of ssd_fx; `dynamic`, `mode`: as in `torch.compile`.

    Raises:
        ValueError: the model does not compile as one graph with a backward; and what `look` raises.
    """

    def backend(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], **given: Any) -> Any:
        return compile_graph(gm, inputs, survey=partial(_survey, look), mode=mode, **given)

    args, kwargs = call
    torch._dynamo.reset()  # Dynamo compiles a function eight times at most
    compiled = torch.compile(model, backend=backend, options=dict(options or {}), dynamic=dynamic, fullgraph=True)
    try:
        with _not_in_place(model), uncalled(_logging()):
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


def survey(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], look: Look[T], options: Mapping[str, Any], mode: str | None
) -> T | None:
    """What `look` finds in the joint graph of a Dynamo graph; None if it has no backward. For use in a backend.

    Raises:
        ValueError: nothing of the graph may be offloaded; and what `look` raises.
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
    """Look at a joint graph, and end the compilation.

    Raises:
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
    """The user's model behind the result of `torch.compile`, or behind what `Module.compile` hands to it."""
    if getattr(model, "__func__", None) is torch.nn.Module._call_impl:
        return model.__self__  # type: ignore[attr-defined, no-any-return]
    return getattr(model, "_orig_mod", model)


@contextmanager
def _not_in_place(model: Callable[..., Any]) -> Iterator[None]:
    """Within, no module of the model calls what `Module.compile` has made of it, as if that had not been called."""
    with ExitStack() as stack:
        for each in model.modules() if isinstance(model, nn.Module) else ():
            if each._compiled_call_impl is not None:
                stack.enter_context(mock.patch.object(each, "_compiled_call_impl", None))
        yield


def _logging() -> set[Callable[..., Any]]:
    """The functions that only print or log. Libraries add methods to loggers, so these are looked up late."""
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
