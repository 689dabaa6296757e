"""Runs generated code without a device, and counts what lives meanwhile.

The code that Inductor writes for a graph is Python that allocates, calls and drops its references. Here its tensors are
fake ones and its kernels do nothing. Every storage counts from its first tensor to the death of its last, which is what
PyTorch's allocator counts. Our operators do what they are traced as: a release holds nothing, and a load is one more
tensor from where it stands.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssd_fx.runtime import calls as calls_of_ours
from tests.cuda_codegen.code import DEFINITIONS_END, LAUNCHED
from tests.passes.lowered import Lowered

FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class Living(TorchDispatchMode):
    """Counts the storages of what is computed within. `peak`: the most bytes, those included that a call takes and
    gives back."""

    def __init__(self, before: Sequence[Tensor]) -> None:
        super().__init__()
        self._before = [x.untyped_storage() for x in before]  # held, so that no other storage gets their addresses
        self._known = {storage._cdata for storage in self._before}
        self._live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self._live + (flash_workspace(*args) if func is FLASH_BACKWARD else 0))
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._live += storage.nbytes()
            weakref.finalize(storage, self._dies, storage._cdata, storage.nbytes())

    def _dies(self, key: int, nbytes: int) -> None:
        self._known.remove(key)
        self._live -= nbytes


def flash_workspace(grad: Tensor, query: Tensor, *_: object) -> int:
    """What flash attention's backward takes and gives back where rows are a multiple of 128, columns of 32 up to 128,
    and queries have no more heads than keys: a gradient and a sum for every row, in float32."""
    return 4 * (query.numel() + query.numel() // query.shape[-1])


def walked(forward: Lowered, backward: Lowered, tangents: int = 1) -> int:
    """The peak of a step in bytes, above what its inputs have. The caller has results with gradients, `tangents` of
    them, and what the forward saves goes to the backward alone."""
    inputs = [torch.empty_like(x) for x in forward.inputs]
    with Living(inputs) as living:
        results = _call(forward)(inputs)
        saved = list(results[len(results) - (len(backward.inputs) - tangents) :])
        returned = results[: len(results) - len(saved)]
        del results
        saved += [torch.empty_like(x) for x in backward.inputs[len(saved) :]]
        gradients = _call(backward)(saved)
        del returned, gradients
    return living.peak


def _call(graph: Lowered) -> Callable[[list[Any]], Sequence[Any]]:
    """The function that the code defines, with kernels that do nothing."""
    calls = graph.code.partition(DEFINITIONS_END)[2]
    names: dict[str, Any] = dict.fromkeys(LAUNCHED.findall(calls), SimpleNamespace(run=_nothing))
    names |= dict.fromkeys(("assert_size_stride", "assert_alignment", "get_raw_stream"), _nothing)
    names |= {"torch": torch, "math": math, "aten": torch.ops.aten, "device": torch.device, "inf": math.inf}
    names |= {"async_compile": None, "extern_kernels": _Extern(), "reinterpret_tensor": _reinterpreted}
    names |= {"ssd_fx_ops": calls_of_ours, "empty_strided_cuda": _empty, "copy_if_misaligned": lambda x: x}
    exec(compile(calls, "generated code", "exec"), names)
    call: Callable[[list[Any]], Sequence[Any]] = names["call"]
    return call


def _nothing(*_: object, **__: object) -> None: ...


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpreted(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


class _Extern:
    """Library calls: those with `out` do nothing, others return what the operator of that name does."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.aten, name)
        return lambda *args, out=None, **kwargs: out if out is not None else operator(*args, **kwargs)
