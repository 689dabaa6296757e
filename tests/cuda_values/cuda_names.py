"""What Inductor's CUDA code calls, mapped to the device of `late_gpu`, for a process that does nothing else.

empty_strided_cuda, device(type="cuda")   memory of that device
kernels (`CachingAutotuner.run`)          queued; then PyTorch's launcher gives them to Triton's interpreter
extern_kernels, torch.ops.aten            queued by `OnDevice`; then PyTorch's CPU kernels
ssd_fx_ops                                called: the runtime itself
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.cuda_codegen import pretend
from tests.cuda_values import interpreter
from tests.cuda_values.late_gpu import present

_WAIT = re.compile(r"^ *ssd_fx_ops\.wait_load_\(.*\n", re.MULTILINE)
_CONFIGURED = (torch.ops.ssd_fx.begin_.default, torch.ops.ssd_fx.store.default)
WIDEST = 4096
without_waits = False  # a planted fault: generated code loses them


def install() -> None:
    """From here on, until the process ends."""
    pretend.device()
    interpreter.install()
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]
    torch._C._dynamo.guards._empty_strided_cuda = _empty_strided
    triton_helpers.set_driver_to_gpu = lambda: None
    launch, load = triton_heuristics.CachingAutotuner.run, GraphLowering._compile_to_module_lines

    def run(kernel: Any, *args: Any, stream: int) -> None:
        kernel.configs = [_wide(kernel)]
        present().launch(kernel.fn.__name__, lambda *found: launch(kernel, *found, stream=stream), *args)

    def loaded(graph: GraphLowering, code: Any) -> ModuleType:
        if without_waits:
            code.value = _WAIT.sub("", code.value)
        module: Any = load(graph, code)
        module.device = lambda *named, **more: torch.device("cpu")
        return module

    triton_heuristics.CachingAutotuner.run = run
    GraphLowering._compile_to_module_lines = loaded


def _wide(kernel: Any) -> Any:
    """The first configuration that PyTorch proposes, with wider blocks: the interpreter runs one after the other."""
    config = copy.deepcopy(kernel.configs[0])
    if "XBLOCK" in config.kwargs and not kernel.is_mix_order_reduction:
        config.kwargs["XBLOCK"] = max(config.kwargs["XBLOCK"], min(kernel.size_hints["x"], WIDEST))
    return config


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():  # no call of the step
        return present().empty(tuple(size), tuple(stride), dtype, None)


class OnDevice(TorchDispatchMode):
    """Queues every operator that computes. Ours, and those that return a view, are the host's.

    `config`: if given, what our operators get instead of the config in the graphs.
    """

    def __init__(self, config: str = "") -> None:
        super().__init__()
        self._config = config
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        returned = [each.alias_info for each in op._schema.returns]
        if op in _CONFIGURED and self._config:
            return op(args[0], self._config, *args[2:], **named)
        if op.namespace == "ssd_fx" or (returned and all(to and not to.is_write for to in returned)):
            return op(*args, **named)
        if op is torch.ops.aten._local_scalar_dense.default:
            present().finish()
            return op(*args, **named)
        if any(returned) or not returned:
            present().launch(str(op), op, *args, **named)
            written = [_given(op, i, args, named) for i, to in enumerate(returned) if to]
            return written[0] if len(written) == 1 else tuple(written)
        outs = pytree.tree_map_only(Tensor, _like, self._shaped(op, args, named))
        present().launch(str(op), _into(op), outs, args, named)
        return outs

    def _shaped(self, op: OpOverload, args: Any, named: Any) -> Any:
        """Tensors without values, of the sizes and strides that the operator returns on CUDA."""
        with self._shapes:
            args, named = pytree.tree_map_only(Tensor, _on_cuda, (args, named))
            return op(*args, **named)


def _given(op: OpOverload, at: int, args: Any, named: Any) -> Any:
    """The argument that the operator writes into and returns at place `at`."""
    written = [(i, each) for i, each in enumerate(op._schema.arguments) if each.alias_info and each.alias_info.is_write]
    place, argument = written[at]
    return named[argument.name] if argument.name in named else args[place]


def _on_cuda(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=pretend.DEVICE)


def _like(x: Tensor) -> Tensor:
    return _empty_strided(tuple(x.shape), x.stride(), x.dtype)


def _into(op: OpOverload) -> Callable[..., None]:
    def call(outs: Any, args: Any, named: Any) -> None:
        found = pytree.tree_leaves(op(*args, **named))
        for out, values in zip(pytree.tree_leaves(outs), found, strict=True):
            if isinstance(out, Tensor):
                out.copy_(values)

    return call
