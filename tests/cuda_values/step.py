"""Training steps whose graphs are Inductor's CUDA code, run on the device of `late_gpu`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ssd_fx
from tests.cuda_codegen import pretend
from tests.cuda_values.cuda_names import OnDevice
from tests.cuda_values.late_gpu import LateGpu
from tests.faults.toys import settle

LEARNING_RATE = 1e-3
_MEASURED = {"joint_graph_constant_folding": False, "shape_padding": False}  # these compute on the device


class _NotRun(Exception):
    """Raised where the compiled forward would run on tensors without values."""


@dataclass(frozen=True)
class Compiled:
    """Both graphs of a model.

    `order`: what `call` takes: names of parameters and buffers, places of inputs. `config`: if given, what the runtime
    gets instead of the config in the graphs.
    """

    call: Callable[..., Sequence[Tensor]]
    order: tuple[str | int, ...]
    config: str = ""


def compiled(model: nn.Module, inputs: Sequence[Tensor], options: Mapping[str, Any] | None, **patches: Any) -> Compiled:
    """The CUDA code of a model; `options` are those of ssd_fx, or None for plain Inductor; `patches` are of Inductor's
    config."""
    torch._dynamo.reset()
    found: list[tuple[Any, Sequence[Any]]] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        call = compile_fx(graph, examples) if options is None else ssd_fx.backend(graph, examples, options=options)

        def catch(*args: Any) -> None:
            found.append((call, args))
            raise _NotRun

        return catch

    fakes = copy.deepcopy(model)
    with (
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        config.patch(fx_graph_cache=False, **_MEASURED),
        contextlib.suppress(_NotRun),
    ):
        pretend.move(fakes)
        moved = [torch.empty_like(x, device=pretend.DEVICE).requires_grad_(x.requires_grad) for x in inputs]
        torch.compile(fakes, backend=backend, fullgraph=True, dynamic=False)(*moved)
    ((call, args),) = found
    names: dict[int, str | int] = {id(x): name for name, x in _state(fakes).items()}
    names |= {id(x): place for place, x in enumerate(moved)}
    return Compiled(call, tuple(names[id(x)] for x in args))


def train(
    gpu: LateGpu, step: Compiled, model: nn.Module, inputs: Sequence[Tensor], steps: int, *, settled: bool = False
) -> list[Tensor]:
    """The losses, and the gradients of all parameters and inputs, of every step; then the parameters and buffers.

    `settled`: every backward begins when all writes are done.
    """
    torch.manual_seed(0)  # seeds are drawn when the device comes to it
    state = {name: gpu.put(x) for name, x in _state(model).items()}
    moved = [gpu.put(x) for x in inputs]
    seen: list[Tensor] = []
    with OnDevice(step.config):
        for _ in range(steps):
            loss = step.call(*(state[at] if isinstance(at, str) else moved[at] for at in step.order))[0].sum()
            if settled:
                settle()
            loss.backward()
            seen += [loss.detach(), *_descend([*state.values(), *moved])]
            del loss
    gpu.finish()
    return [x.clone() for x in (*seen, *state.values())]


def eager(model: nn.Module, inputs: Sequence[Tensor], steps: int) -> list[Tensor]:
    """What `train` returns, of the model as it is."""
    model = copy.deepcopy(model)
    own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    seen: list[Tensor] = []
    for _ in range(steps):
        loss = model(*own).sum()
        loss.backward()
        seen += [loss.detach(), *_descend([*_state(model).values(), *own])]
    return [*seen, *_state(model).values()]


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _descend(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, which the leaves follow and lose."""
    gradients = []
    with torch.no_grad():
        for leaf in leaves:
            if leaf.grad is not None:
                gradients.append(leaf.grad)
                leaf.add_(leaf.grad, alpha=-LEARNING_RATE)
                leaf.grad = None
    return gradients
