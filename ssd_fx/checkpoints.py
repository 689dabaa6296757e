"""`torch.utils.checkpoint` whose saved inputs are on NVMe between forward and backward.

    forward     x -- function(x) --> y          x is stored, what the function saves is dropped
    backward    x is read while the checkpoint behind it is computed again; function(x) runs once more

The checkpoint itself is PyTorch's. It saves the arguments under the hooks for saved tensors, which are ours meanwhile.

Whether a backward can come is certain only when the function has returned: if it cannot, PyTorch has dropped what it
saved. A call that will be computed again, as far as one sees, is stored while its function runs. Any other is stored
when its function has returned, if it still can be computed again. So what is frozen writes nothing, and a wrong guess
delays a write, or writes once in vain, and changes nothing else.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ssd_fx.backend import check_options, within_ours
from ssd_fx.compat import is_within_checkpoint, skip_code
from ssd_fx.config import Config
from ssd_fx.runtime import errors, stats
from ssd_fx.runtime.layout import is_parameter
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.will_recompute import doubt, kind_of, learn

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
    arguments = _Arguments(*_settings(options), function, args, kwargs)
    with saved_tensors_hooks(arguments.pack, _unpack):
        made = torch_checkpoint(_marked(function), *args, use_reentrant=False, **kwargs)
    arguments.end()
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


@dataclass(frozen=True, eq=False)
class _Run:
    """A call that stores, with its number among those of its step. It lives as long as what it stored."""

    number: int

    @property
    def name(self) -> str:
        return f"{stats.CHECKPOINT} {self.number}"


@dataclass(frozen=True)
class _Stored:
    """Where an argument is that is stored; `seq`: its number among those of its checkpoint."""

    run: _Run
    handle: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    seq: int


@dataclass(frozen=True)
class _Kept:
    """An argument that is in memory, with its version: under hooks autograd does not compare versions."""

    tensor: Tensor
    version: int


@dataclass(eq=False)
class _Saved:
    """What autograd has instead of an argument. It lives as long as the function may be computed again."""

    where: _Stored | _Kept


class _Arguments:
    """The arguments of one checkpoint: they are saved by PyTorch when it begins, and stored then or at its end."""

    def __init__(
        self,
        options: Config,
        config: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._options, self._config = options, config
        self._least = max(options.min_bytes, 1)
        self._seq = itertools.count()
        self._run: _Run | None = None
        self._saved: list[weakref.ref[_Saved]] = []  # those that leave, now or when the function has returned
        tensors = [x for x in args if isinstance(x, Tensor)]
        leaving = [x for x in tensors if self._leaves(x)]
        if not leaving:
            return
        self._device = leaving[0].device
        self._saved_bytes, self._leaving_bytes = (sum(x.nbytes for x in some) for some in (tensors, leaving))
        self._kind = kind_of(function, args, kwargs)
        if not doubt(self._kind):
            self._run = self._begin()

    def pack(self, x: Tensor) -> _Saved:
        saved = _Saved(_Kept(x, x._version))
        if self._leaves(x):
            if self._run:
                saved.where = self._store(x, self._run)
            self._saved.append(weakref.ref(saved))
        return saved

    def end(self) -> None:
        """Stores what was not stored before the function ran, if a backward may come. Notes whether one may."""
        if not self._saved:
            return
        living = [saved for saved in (ref() for ref in self._saved) if saved]
        learn(self._kind, again=bool(living))
        if self._run or not living:
            return
        run = self._begin()
        for saved in living:
            kept = saved.where
            # what was changed meanwhile stays: the backward refuses it
            if isinstance(kept, _Kept) and kept.tensor._version == kept.version:
                saved.where = self._store(kept.tensor, run)

    def _begin(self) -> _Run:
        run = _next_run()
        if self._options.cpu_allocator and self._device.type == "cpu":
            CPU_ALLOCATOR.install()
        with torch.no_grad():
            token = torch.empty(0, dtype=torch.int64, device=self._device)
            ops.begin_(token, self._config, run.name, self._saved_bytes, self._leaving_bytes)
        return run

    def _store(self, x: Tensor, run: _Run) -> _Stored:
        number = next(self._seq)
        with torch.no_grad():
            handle = ops.store(x, self._config, run.name, number, 2 * number)
            # whoever writes into it from here on changes its version, which the load compares
            ops.wait_store_(handle, x, 2 * number + 1, True)
        return _Stored(run, handle, x.shape, x.stride(), x.dtype, x.device, 2 * number)

    def _leaves(self, x: Tensor) -> bool:
        plain = type(x) is Tensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg() or x.is_quantized)
        return plain and x.device.type != "meta" and x.nbytes >= self._least and not is_parameter(x)


def _unpack(saved: _Saved) -> Tensor:
    """The argument again.

    Raises: RuntimeError if it was changed in place meanwhile; OSError if it cannot be read.
    """
    global _turned
    _turned = True
    found = saved.where
    if isinstance(found, _Kept):
        if found.tensor._version != found.version:
            raise errors.changed_while_kept(found.tensor, found.version)
        return found.tensor
    with torch.no_grad():
        where = (found.size, found.stride, found.dtype, found.device)
        # not to be donated: another backward through other outputs may compute the function again
        x: Tensor = ops.load(found.handle, *where, found.seq, False, "strides", False)
        ops.wait_load_(x, found.handle, found.seq + 1)
    return x


def _next_run() -> _Run:
    """The next call of its step that stores. Its name is the same in every step, so the runtime can learn.

    If no backward comes, as in an evaluation, the names begin again when the call that had the first one is gone. The
    others of its step may live, and keep their names for themselves.
    """
    global _calls, _taken, _turned, _first
    with _naming:
        if _turned or _first is None or _first() is None:
            _taken = frozenset() if _turned else frozenset(run.number for run in _living)
            _calls, _turned, _first = itertools.count(), False, None
        run = _Run(next(number for number in _calls if number not in _taken))
        _living.add(run)
        _first = _first or weakref.ref(run)
        return run


_naming = threading.Lock()
_calls = itertools.count()
_taken = frozenset[int]()  # the numbers of calls that this step leaves out
_turned = False  # whether a backward has come since the last call that stores: the next one is the first of its step
_first: weakref.ref[_Run] | None = None  # the call of this step that stored first
_living: weakref.WeakSet[_Run] = weakref.WeakSet()


def _after_fork() -> None:
    """In the child no thread names its call."""
    global _naming
    _naming = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
