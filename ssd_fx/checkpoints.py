"""`torch.utils.checkpoint` whose saved inputs are on NVMe between forward and backward.

    forward     x -- function(x) --> y          x is stored, what the function saves is dropped
    backward    x is read while the checkpoint behind it is computed again; function(x) runs once more

The checkpoint itself is PyTorch's. It saves the arguments under the hooks for saved tensors, which are ours meanwhile.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ssd_fx.backend import check_options, within_ours
from ssd_fx.compat import is_within_checkpoint, skip_code, tree_leaves
from ssd_fx.config import Config
from ssd_fx.runtime import errors, stats
from ssd_fx.runtime.layout import is_parameter
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

T = TypeVar("T")
ops = torch.ops.ssd_fx


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    use_reentrant: bool | None = False,
    **kwargs: Any,
) -> T:
    """Return `function(*args, **kwargs)`, of which the backward computes again what it needs.

    As `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, whose results it has to the bit. But the tensors
    among `args` are on disk until the backward, which reads them ahead::

        for block in self.blocks:
            x = ssd_fx.checkpoint(block, x)

    It works in eager mode and around modules that are compiled, by any backend. Inside compiled code, and inside
    another checkpoint, it is PyTorch's checkpoint. If the graph breaks inside of it, Python makes the call, and stores
    are made. These arguments stay in memory: what is smaller than `min_bytes`; parameters and other leaves that get a
    gradient; tensor subclasses; those of `kwargs`.

    Args:
        function: a module or function, called in the forward, and once more for each backward.
        options: those of `ssd_fx.Config` that the runtime has, such as `dirs`, `min_bytes`, `budget` in bytes,
            `host_budget`. Default: those in the environment, which is read at the first call. The other options are for
            compiled graphs. A share as `budget` lets everything leave.
        use_reentrant: False or None.
        kwargs: those of PyTorch's function (`context_fn`, `preserve_rng_state`, `determinism_check`, `early_stop`,
            `debug`), and those of `function`.

    Raises:
        ValueError: `use_reentrant=True`, or a bad option.
        OSError: a directory that cannot be used; in the backward, a tensor that cannot be read.
        RuntimeError: in the backward, an argument that was changed in place after the forward.
    """
    if use_reentrant:
        raise ValueError("use_reentrant=True: ssd_fx.checkpoint is not reentrant; right would be use_reentrant=False")
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)  # type: ignore[no-any-return]
    return _uncompiled(function, args, options, kwargs)  # type: ignore[no-any-return]


skip_code(checkpoint.__code__)
"""If the graph breaks inside a checkpoint, Dynamo cannot trace it into the code around it, and Python calls it. Without
this, Dynamo would begin to compile at that call, and in compiled code it is PyTorch's checkpoint."""


@torch.compiler.disable(reason="it stores, and calls PyTorch's checkpoint")  # type: ignore[untyped-decorator]
def _uncompiled(
    function: Callable[..., T], args: tuple[Any, ...], options: Mapping[str, Any] | None, kwargs: Mapping[str, Any]
) -> T:
    if not torch.is_grad_enabled() or is_within_checkpoint():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)  # type: ignore[no-any-return]
    arguments = _Arguments(*_settings(options), args)
    with saved_tensors_hooks(arguments.pack, _unpack):
        made = torch_checkpoint(_marked(function), *args, use_reentrant=False, **kwargs)
    arguments.learn(made)
    return made  # type: ignore[no-any-return]


def _marked(function: Callable[..., T]) -> Callable[..., T]:
    """`function`, whose graphs know that they are compiled within a checkpoint of ours."""

    def called(*args: Any, **kwargs: Any) -> T:
        before, within_ours.now = getattr(within_ours, "now", False), True
        try:
            return function(*args, **kwargs)
        finally:
            within_ours.now = before

    return called


def _settings(options: Mapping[str, Any] | None) -> tuple[Config, str]:
    """All options, and the runtime's as the JSON in its operators. Raises: what `check_options` raises."""
    found = _known.get(repr(options))
    if found is None:
        config = check_options(options)
        stats.rated(config.own_drive_tbw)
        found = _known[repr(options)] = config, config.runtime_json()
    return found


_known: dict[str, tuple[Config, str]] = {}
"""By the options as text."""


@dataclass(frozen=True)
class _Stored:
    """What autograd has instead of an argument that is stored; `seq`: its number among those of its checkpoint."""

    handle: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seq: int


@dataclass(frozen=True)
class _Kept:
    """An argument that stays in memory, with its version: under hooks autograd does not compare versions."""

    tensor: Tensor
    version: int


class _Arguments:
    """The arguments of one checkpoint, while PyTorch saves them."""

    def __init__(self, options: Config, config: str, args: tuple[Any, ...]) -> None:
        self._config = config
        self._least = max(options.min_bytes, 1)
        self._seq = itertools.count()
        tensors = [x for x in args if isinstance(x, Tensor)]
        leaving = [x for x in tensors if self._leaves(x)]
        self._graph = ""
        self._name = _next_name() if leaving else ""
        if not leaving or self._name in _without_gradient:
            return
        self._graph = self._name
        device = leaving[0].device
        if options.cpu_allocator and device.type == "cpu":
            CPU_ALLOCATOR.install()
        saved, offloaded = (sum(x.nbytes for x in some) for some in (tensors, leaving))
        with torch.no_grad():
            ops.begin_(torch.empty(0, dtype=torch.int64, device=device), config, self._graph, saved, offloaded)

    def learn(self, made: object) -> None:
        """Notes whether `made` needs a gradient. If not, nothing is computed again, so the next step stores nothing."""
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(made)):
            _without_gradient.discard(self._name)
        else:
            _without_gradient.add(self._name)

    def pack(self, x: Tensor) -> _Stored | _Kept:
        if not self._graph or not self._leaves(x):
            return _Kept(x, x._version)
        number = next(self._seq)
        with torch.no_grad():
            handle = ops.store(x, self._config, self._graph, number, 2 * number)
            # whoever writes into it from here on changes its version, which the load compares
            ops.wait_store_(handle, x, 2 * number + 1, True)
        return _Stored(handle, x.shape, x.stride(), x.dtype, x.device, 2 * number)

    def _leaves(self, x: Tensor) -> bool:
        plain = type(x) is Tensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x.is_quantized)
        return plain and x.device.type != "meta" and x.nbytes >= self._least and not is_parameter(x)


def _unpack(saved: _Stored | _Kept) -> Tensor:
    """The argument again.

    Raises: RuntimeError if it was changed in place meanwhile; OSError if it cannot be read.
    """
    global _turned
    _turned = True
    if isinstance(saved, _Kept):
        if saved.tensor._version != saved.version:
            raise errors.changed_while_kept(saved.tensor, saved.version)
        return saved.tensor
    with torch.no_grad():
        where = (saved.size, saved.stride, saved.dtype, saved.device)
        # not to be donated: another backward through other outputs may compute the function again
        x: Tensor = ops.load(saved.handle, *where, saved.seq, False, "strides", False)
        ops.wait_load_(x, saved.handle, saved.seq + 1)
    return x


def _next_name() -> str:
    """The name of the next checkpoint of its step: the same in every step, so the runtime can learn."""
    global _calls, _turned
    with _naming:
        if _turned:
            _calls, _turned = itertools.count(), False
        return f"{stats.CHECKPOINT} {next(_calls)}"


_without_gradient: set[str] = set()
"""The checkpoints whose outputs needed no gradient when they ran last, by name."""
_naming = threading.Lock()
_calls = itertools.count()
_turned = False  # whether a backward has come since the last checkpoint: the next one is the first of its step
