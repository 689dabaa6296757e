"""Gradients of PyTorch's operators, by the samples of its own OpInfo database: `op(x * one) * one`, compiled.

    one, x -> mul -> op -> mul -> outputs       `one` wants a gradient, so that the results of op are saved;
                                                x * one is no input of the graph, so that what op saves is not free

Each sample is trained in eager mode, by AOTAutograd with PyTorch's partitioner, and with ours: from the drive, then
with every tensor given away from memory. Stock and ours run the same partition, and have to agree bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.debugging import boxed_nop
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import ssd_fx
from ssd_fx.backend import plan_options
from ssd_fx.config import Config
from ssd_fx.passes.partitioner import Partitioner
from ssd_fx.runtime.engines.registry import ENGINES
from ssd_fx.runtime.stores import close_stores
from tests import sources
from tests.bitwise import differences
from tests.faults.toys import settle

Call = Callable[..., tuple[Tensor, ...]]
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass(frozen=True)
class Case:
    """One operator of the database, as a function or in its in-place form, with the largest sample of one type;
    `dynamic`: traced for any sizes."""

    op: OpInfo
    dtype: torch.dtype
    in_place: bool = False
    dynamic: bool = False

    @property
    def name(self) -> str:
        short = str(self.dtype).removeprefix("torch.")
        variant = f".{self.op.variant_test_name}" if self.op.variant_test_name else ""
        return f"{self.op.name}{variant}{'_' if self.in_place else ''}-{short}{'-dynamic' if self.dynamic else ''}"

    def sample(self) -> SampleInput | None:
        """None where no sample wants a gradient."""
        torch.manual_seed(0)
        found = self.op.sample_inputs("cpu", self.dtype, requires_grad=True)
        fit = [s for s in found if not (self.in_place and s.broadcasts_input)]
        fit = [s for s in fit if any(t.requires_grad and t.numel() for t in _tensors(s))]
        return max(fit, key=lambda s: sum(t.numel() for t in _tensors(s)), default=None)


def cases() -> Iterator[Case]:
    """All of the database that has gradients on the CPU: float32, or the first type that has, as it is and for any
    sizes; complex64, bfloat16 and float64."""
    for op in op_db:
        types = sorted(op.supported_backward_dtypes("cpu"), key=str) if op.supports_autograd else []
        real = [t for t in types if t.is_floating_point]
        chosen = [torch.float32 if torch.float32 in real else real[0]] if real else []
        if chosen:
            yield Case(op, chosen[0], dynamic=True)
        chosen += [t for t in (torch.complex64, torch.bfloat16, torch.float64) if t in types and t not in chosen]
        for dtype in chosen:
            yield Case(op, dtype)
            if op.inplace_variant is not None and op.supports_inplace_autograd and dtype == torch.float32:
                yield Case(op, dtype, in_place=True)


def _tensors(sample: SampleInput) -> list[Tensor]:
    return [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]


class Program:
    """One sample as a function of `one` and of all its tensors, of which those that want a gradient are multiplied."""

    def __init__(self, case: Case, sample: SampleInput) -> None:
        self.dynamic = case.dynamic
        self.tolerance = 5e-2 if case.dtype == torch.bfloat16 else 1e-3
        given, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(given) if isinstance(x, Tensor)]
        op = case.op.inplace_variant if case.in_place else case.op.op
        self.tensors = [given[i] for i in places]
        wanted = [x.requires_grad for x in self.tensors]

        def run(one: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            flat = list(given)
            for place, x, want in zip(places, tensors, wanted, strict=True):
                flat[place] = x * one if want else x
            x, args, kwargs = tree_unflatten(flat, spec)
            outputs = [y for y in tree_leaves(op(x, *args, **kwargs)) if isinstance(y, Tensor)]
            return tuple(y * one if y.is_floating_point() or y.is_complex() else y for y in outputs)

        self.run: Call = run

    def train(self, compiled: Call) -> list[Tensor | None]:
        """The outputs, then the gradients of `one` and of the tensors; what is written is on disk before it is read."""
        torch.manual_seed(1)
        one = torch.ones((), requires_grad=True)
        tensors = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.tensors]
        outputs = compiled(one, *(x.clone() for x in tensors))  # no leaves: those would be in memory anyway
        settle()
        roots = [y for y in outputs if y.requires_grad]
        torch.manual_seed(2)
        tangents = [torch.randn_like(y) for y in roots]
        leaves = [one, *(x for x in tensors if x.requires_grad)]
        return [*(y.detach() for y in outputs), *torch.autograd.grad(roots, leaves, tangents, allow_unused=True)]


@dataclass(frozen=True)
class Verdict:
    """`stock`: "" where PyTorch's partition computes what eager mode does, else why not; `ours`: "" where ours computes
    bit by bit what stock does, or refuses what it refuses, from every source; `groups`: stored by ours; `seen`: whether
    the planted fault changes what is computed."""

    stock: str
    ours: str
    groups: int
    seen: bool = False


def judge(program: Program, partitioner: Partition, faulty: Partition | None = None) -> Verdict:
    """`partitioner`: the one under test; `faulty`: one with a planted fault."""
    eager = _attempt(program, program.run)
    kept, function = compiled(program, min_cut_rematerialization_partition), compiled(program, partitioner)
    groups, found, runs = 0, [], []
    for source, force in FROM.items():
        runs.append(_attempt(program, kept))  # again each time: some of stock's functions are others the second time
        with force():
            ssd_fx.reset_stats()
            ours = _attempt(program, function)
            groups = max(groups, ssd_fx.stats().stores)
        found += [f"{source}: {apart}" for apart in [_apart(runs[-1], ours)] if apart]
    stock = runs[0]
    if isinstance(stock, Exception):
        return Verdict(_first_line(stock), "; ".join(found), groups)
    near = isinstance(eager, Exception) or _close(stock, eager, program.tolerance)
    other = _attempt(program, compiled(program, faulty)) if faulty is not None and groups else stock
    seen = isinstance(other, Exception) or bool(differences(other, stock))
    return Verdict("" if near else "is not near eager mode", "; ".join(found), groups, seen)


def _apart(stock: list[Tensor | None] | Exception, ours: list[Tensor | None] | Exception) -> str:
    """How ours ends otherwise than stock, or empty."""
    if isinstance(stock, Exception):
        return "" if isinstance(ours, Exception) else "trains what stock refuses"
    if isinstance(ours, Exception):
        return f"refuses: {_first_line(ours)}"
    return "has other bits than stock" if differences(ours, stock) else ""


@contextmanager
def given_away() -> Iterator[None]:
    """No write ends before its tensor is wanted, which is then given to the backward."""
    source = sources.SOURCES["given_away"]
    close_stores()
    with source.forced(), mock.patch.dict(ENGINES, {"posix": ENGINES[sources.ENGINE]}):
        yield
        stats = ssd_fx.stats()
        assert not stats.read_bytes, f"{stats.read_bytes} B were read, though all should be in memory"
    close_stores()


FROM: dict[str, Callable[[], AbstractContextManager[None]]] = {"read": nullcontext, "given away": given_away}


def compiled(program: Program, partitioner: Partition) -> Call:
    """As `aot_eager` compiles, without Dynamo, which takes seconds for a sample and has no part in this."""
    function = aot_function(
        program.run,
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partitioner,
        dynamic=program.dynamic,
    )
    return cast(Call, function)


def partitioner(directory: Path, **options: Any) -> Partitioner:
    """Of ssd_fx, with stock's partition and everything on disk."""
    given = {"dirs": [str(directory)], "inner": "aot_eager", "budget": 0, "min_bytes": 0, "recompute": False}
    given |= {"machine": "default", "adapt": False, "engine": "posix"} | options
    return Partitioner(plan_options(Config.make(given), torch.device("cpu")))


def _attempt(program: Program, compiled: Call) -> list[Tensor | None] | Exception:
    try:
        return program.train(compiled)
    except Exception as error:  # what stock refuses, ours has to refuse
        return error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def _close(a: Sequence[Tensor | None], b: Sequence[Tensor | None], tolerance: float) -> bool:
    try:
        torch.testing.assert_close(list(a), list(b), rtol=tolerance, atol=tolerance / 10, equal_nan=True)
    except AssertionError:
        return False
    return True
