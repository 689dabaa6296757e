"""What a random program is given: makes its tensors and blocks, and notes the outcome of each of its lines.

    def program(t):
        b0 = t.block("Mlp")
        x0 = t.leaf(4)
        with t: y0 = b0(x0)
        with t: t.loss(y0).backward()

An outcome is the kind of error that a line ended in, and the tensors that it noted.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.callers.blocks import WIDTH, WORDS

Call = Callable[..., Any]
# The name of a block to its class, and to what makes a callable of an instance.
Blocks = Callable[[str], tuple[type[nn.Module], Callable[[nn.Module], Call]]]
HUNG_S = 120
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}
# What an error is about, whatever else it says.
SUBJECTS = (
    "modified by an inplace operation",
    "backward through the graph a second time",
    "does not require grad",
    "donated buffers",
    "double backward",
    "leaf Variable that requires grad",
    "view was created in no_grad mode",
    "is a view and is being modified inplace",
    "Checkpointing is not compatible with .grad()",
)


@dataclass
class Outcome:
    """Of one line: `kind` of error, or empty; `values`: by name, bits that do not change any more; `hooked`: whether
    saved tensors went through hooks before it ended."""

    line: int
    kind: str
    values: dict[str, Tensor | None]
    hooked: bool


def kind_of(error: BaseException) -> str:
    """The type of an error and what it is about."""
    name, text = type(error).__name__, str(error)
    if name in ("NameError", "UnboundLocalError"):
        return "NameError"  # the line that should have made it failed
    if name == "CheckpointError":
        return name
    about = next((s for s in SUBJECTS if s in text), None)
    return f"{name}: {about or re.sub('[0-9]+', 'N', text.strip().partition(chr(10))[0])[:160]}"


class Caller:
    """Runs one program once; `precision`: a key of DTYPES."""

    def __init__(self, blocks: Blocks, precision: str) -> None:
        self._blocks, self._precision = blocks, precision
        self._generator = torch.Generator().manual_seed(0)
        self._leaves: list[Tensor] = []
        self._modules: list[nn.Module] = []
        self._kept: list[Any] = []
        self._hooked = False
        self._at_once = False  # whether several threads run
        self._noted: dict[str, Tensor | None] = {}
        self.outcomes: list[Outcome] = []

    # ---- lines

    def __enter__(self) -> None:
        self._noted = {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        self._end_line(kind_of(error) if error else "", self._noted)
        return True

    def _end_line(self, kind: str, values: dict[str, Tensor | None]) -> None:
        self.outcomes.append(Outcome(len(self.outcomes), kind, values, self._hooked))

    def note(self, *found: Any) -> None:
        """What these tensors are now is part of the line's outcome."""
        for t in tree_leaves(found):
            self._noted[f"value {len(self._noted)}"] = _copy(t)

    def end(self, names: dict[str, Any]) -> None:
        """What every name stands for in the end, and the gradients of leaves and parameters."""
        found: dict[str, Tensor | None] = {}
        for name, value in names.items():
            if isinstance(value, Tensor):
                found[name] = _copy(value)
                found[f"{name}.grad"] = _gradient(value)
        for number, leaf in enumerate(self._leaves):
            found[f"leaf {number}.grad"] = _copy(leaf.grad)
        for number, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                found[f"block {number} {name}"] = _copy(parameter)
                found[f"block {number} {name}.grad"] = _copy(parameter.grad)
            found |= {f"block {number} {n}": _copy(b) for n, b in module.named_buffers()}
        self._end_line("", found)
        self._kept.clear()  # hooks are in graphs, and what they kept may hold those: no collector sees that circle

    @property
    def made(self) -> list[Tensor]:
        """Leaves and parameters, which every graph holds."""
        return self._leaves + [p for m in self._modules for p in m.parameters()]

    # ---- tensors and blocks

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(DTYPES[self._precision])

    def leaf(self, rows: int) -> Tensor:
        """Wants a gradient."""
        self._leaves.append(self._random(rows, WIDTH).requires_grad_())
        return self._leaves[-1]

    def hidden(self, rows: int) -> Tensor:
        """What an eager layer before the block made."""
        return self.leaf(rows) * 1.0

    def plain(self, rows: int) -> Tensor:
        """Wants no gradient."""
        return self._random(rows, WIDTH)

    def index(self, rows: int) -> Tensor:
        return torch.randint(WORDS, (rows,), generator=self._generator)

    def block(self, name: str, **how: int) -> Call:
        """A compiled module; those of one name share their code."""
        kind, compiled = self._blocks(name)
        module = kind(**how)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self._generator) * 0.5)
        module.to(DTYPES[self._precision])
        self._modules.append(module)
        call = compiled(module)
        if self._precision != "autocast":
            return call

        def cast(*args: Any) -> Any:
            # PyTorch 2.13 hangs where one thread leaves autocast and another traces an operator under it: the first
            # frees the cache of casts, holding its mutex, and wants the GIL; the other has the GIL and wants the mutex.
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=not self._at_once):
                return call(*args)

        return cast

    def loss(self, *tensors: Tensor) -> Tensor:
        """One number that depends on every element, and saves none of the tensors."""
        parts = [(t.float() * torch.linspace(-1, 1.5, t.numel()).reshape(t.shape)).sum() for t in tensors]
        return torch.stack(parts).sum()

    # ---- what callers do

    def parameters(self, block: int) -> list[nn.Parameter]:
        return list(self._modules[block].parameters())

    def sgd(self, block: int) -> None:
        """A step of the optimizer."""
        torch.optim.SGD(self.parameters(block), lr=0.5).step()

    def step(self, call: Call, x: Tensor) -> tuple[Tensor, ...]:
        """Forward and backward; the gradients of a copy of `x`."""
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(self.loss(*tree_leaves(call(leaf))), [leaf])

    def keep(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Hooks that keep what they are given, without its node, which would hold itself through what it returned."""

        def pack(x: Any) -> Any:
            self._hooked = True
            self._kept.append(x.data)
            return self._kept[-1]

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    def checkpoint(self, call: Call, *args: Any, reentrant: bool) -> Any:
        return checkpoint(call, *args, use_reentrant=reentrant)

    def thread(self, *calls: Callable[[], Any]) -> Any:
        """All at a time, each in a thread of its own; what the first returns, or the first error."""
        results: list[Any] = [None] * len(calls)
        errors: list[BaseException | None] = [None] * len(calls)

        def run(number: int) -> None:
            try:
                results[number] = calls[number]()
            except BaseException as error:
                errors[number] = error

        threads = [threading.Thread(target=copy_context().run, args=(run, i), daemon=True) for i in range(len(calls))]
        self._at_once = len(threads) > 1
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HUNG_S)
        self._at_once = False
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"a thread hangs for {HUNG_S} s")
        for error in errors:
            if error is not None:
                raise error
        return results[0] if len(calls) == 1 else tuple(results)


def _gradient(t: Tensor) -> Tensor | None:
    """None for a tensor that has none, and for a view that PyTorch no longer knows how to differentiate."""
    try:
        return _copy(t.grad) if t.is_leaf or t.retains_grad else None
    except RuntimeError:  # its base was changed in place
        return None


def _copy(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().clone()
