"""Small functions, each named for the hazard that its graph holds, and the way from one to its plan.

Every toy takes CPU tensors that require grad, and returns one tensor; `T` is the 8 x 8 input.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ssd_fx.passes import pipeline
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.decide import decide
from ssd_fx.passes.joint.marks import lift
from ssd_fx.passes.partition import Partition, node_names
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.verify.interface import Before
from ssd_fx.report import dump
from tests.bitwise import Compile

T = TypeVar("T")
Toy = Callable[..., torch.Tensor]
CONFIG = '{"engine":"memory"}'
# Slow I/O against fast compute, so that a few hundred bytes take as long as some operators.
MACHINE = Machine(flops=1e9, memory_bw=1e9, write_bw=1e8, read_bw=1e8, latency_s=0.0)


def relu_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> relu -> mm -> relu: each relu is saved, nothing is shared."""
    return ((x @ w).relu() @ w).relu()


def shared_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """relu -> view -> mm; relu -> mm: a base and its view are saved, one storage."""
    y = (x @ w).relu()
    return (y @ w).sum() + (y.view(4, 16) @ w.view(16, 4)).sum()


def equal_products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> sin; mm_1 -> view: the products are equal, so the min-cut merges them, and views name the lost ones."""
    first, second = (x @ w).split(4)
    return (x @ w).sin().sum() + (x @ w).view(4, 16).cos().sum() + (first @ second.t()).sum()


def views_only(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> chunk -> q, k, v: three slices of one storage are saved, the base itself is not."""
    q, k, v = (x @ torch.cat([w, w, w], 1)).chunk(3, dim=1)
    return ((q @ k.t()) @ v).sum()


def non_contiguous(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> transpose -> sigmoid: what is saved has the strides of its input."""
    return ((x @ w).t().sigmoid() @ w).sum()


def tied_weight(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """w is saved twice, as itself and transposed: a parameter lives anyway."""
    return ((x @ w).tanh() @ w.t()).sum()


def saved_output(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """exp is returned and saved: the caller holds it anyway."""
    return (x @ w).exp()


def view_of_output(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A view of what is saved is returned: the caller holds the storage."""
    y = (x @ w).exp()
    return (y @ w).sum(), y.view(-1)


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """relu_ and add_ on an intermediate: functionalized before we see it."""
    y = x @ w
    y.relu_()
    z = (y @ w).add_(1).sin_()
    return (z * y).sum()


def multi_output(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """layer_norm and topk: saved tensors that are items of a tuple."""
    y = torch.nn.functional.layer_norm(x @ w, (8,))
    values, _ = y.topk(4, dim=1)
    return (values @ values.t()).sin().sum()


def expanded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A row expanded over the batch is saved: stride 0, its storage is the row."""
    row = (x @ w).sum(0, keepdim=True).sigmoid()
    return torch.bmm(row.expand(4, 8, 8), (x @ w).sin().expand(4, 8, 8)).sum()


def dtype_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The bytes of an activation are looked at as integers and saved."""
    y = (x @ w).sigmoid()
    bits = y.detach().view(torch.int32) & 0xFF
    return (y @ w).mul(bits.float()).sum()


def dropout(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A bool mask is saved beside the activation."""
    return (torch.nn.functional.dropout((x @ w).relu(), 0.5) @ w).sum()


def half_precision(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """bf16 activations between fp32 parameters."""
    y = (x.bfloat16() @ w.bfloat16()).sigmoid()
    return (y @ y.t()).float().sum()


def rounded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A bf16 difference is saved, and read in the forward by the kernel that computes it: in float32 or rounded?"""
    a, b = x.bfloat16(), w.bfloat16()
    return ((a @ b - b @ a).float() * 3.3).sin().sum()


def complex_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Complex activations, whose conjugates are lazy."""
    z = torch.complex(x @ w, x)
    return (z @ z.conj().t()).abs().sum()


def lazy_negative(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The imaginary part of a conjugate: a real view of complex bytes, every other one, lazily negated."""
    z = torch.complex(x @ w, x @ w + 1)
    return ((z @ z.conj().t()).imag * z.conj().imag).sum()


def real_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Complex numbers, saved as pairs of real ones and conjugated: two dtypes on one storage."""
    z = torch.complex(x @ w, x @ w + 1)
    pairs = torch.view_as_real(z)
    return (pairs.sin() * pairs[..., 0:1]).sum() + (z @ z).abs().sum()


def wide_dtype_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Halves of floats: the saved view has twice as many elements, of half the size."""
    y = (x @ w).sigmoid()
    halves = y.detach().view(torch.int16)[:, 3:5]
    return (y @ w).sum() * (halves * halves).float().sum() + ((y @ w)[:, :2] * halves).sum()


def part_of_an_element(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Seven bfloat16 are saved, and six of them as three floats: the seventh is half an element."""
    y = ((x @ w).flatten()[:7] * 2).bfloat16()
    floats = y.detach()[:6].view(torch.float32)
    return (floats * w.flatten()[:3]).sum() + (y * y).float().sum()


def float8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An activation in eight bits is saved."""
    small = (x @ w).to(torch.float8_e4m3fn)
    return (small.float() * (x @ w.t())).sum()


def scalar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A 0-dim tensor is saved: four bytes are not worth a request."""
    return ((x @ w).sum().exp() * (w @ x).sin()).sum()


def empty(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A tensor without elements is saved."""
    nothing = (x @ w)[:0].sigmoid()
    return (x @ w).sin().sum() + (nothing @ w).sum()


def saved_twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """relu is both factors of a product: one saved tensor, two uses."""
    y = (x @ w).relu()
    return (y @ y).sum()


def unbound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """qkv -> view -> unbind: q, k, v are items of a tuple of views, and permuted."""
    q, k, v = (x @ torch.cat([w, w, w], 1)).view(4, 2, 3, 8).unbind(2)
    return (q.transpose(0, 1) @ k.permute(1, 2, 0) @ v.transpose(0, 1)).sum()


def unsafe_split(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Slices by an operator whose schema says that they alias nothing, and whose storage is another's."""
    a, b = torch.unsafe_split(x @ torch.cat([w, w], 1), 8, 1)
    return ((a @ w) * (b @ w)).sum()


def overlapping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A sliding window is saved: its rows overlap, its bytes are those of the base."""
    windows = (x @ w).relu().view(64).unfold(0, 8, 4)
    return (windows @ w).sum()


def view_of_input(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Slices of an input are saved: the caller has its storage."""
    return (x[:, :4] @ w[:4]).relu().sum()


def narrow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An eighth of a storage is needed, in one piece: it is stored where it lies."""
    y = torch.cat([x] * 8) @ w
    return (y[8:16] @ w).sum()


def slice_of_big_base(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An eighth of a storage is needed, some columns of all rows: a dense copy is stored."""
    y = x @ torch.cat([w] * 8, 1)
    return (y[:, 8:16] @ w).sum()


def neighbouring_slices(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two slices that are columns 8 to 32 of 64: one copy of both and of what lies between."""
    y = x @ torch.cat([w] * 8, 1)
    return (y[:, 8:16].t() @ y[:, 24:32] @ w).sum()


def scattered_slices(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The first and the last columns: what lies between is most of the base, which is stored."""
    y = x @ torch.cat([w] * 8, 1)
    return (y[:, :8] @ y[:, 56:] @ w).sum()


def slice_with_steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Every eighth column is needed."""
    y = x @ torch.cat([w] * 8, 1)
    return (y[:, 2::8] @ w).sum()


def slice_of_permuted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The base is dense in another order than its dimensions say, and a slice of it is saved."""
    y = (x @ torch.cat([w] * 8, 1)).t().sigmoid()
    return (y.detach()[8:16] @ (x @ w)).sum()


def slice_and_living_base(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A slice is saved while the forward goes on to read the base."""
    y = x @ torch.cat([w] * 8, 1)
    return (y[:, 8:16] @ w).relu().sum() + y.sum()


def slice_that_is_reduced(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The backward normalizes with the slice: dense strides could add up in another order, so the base is stored."""
    y = x @ torch.cat([w] * 8, 1)
    return torch.nn.functional.layer_norm(y[:, 8:16], (8,)).sin().sum()


def gaps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """An activation is made with gaps between its rows: only its elements are stored."""
    y = torch.empty_strided((8, 8), (16, 1)).copy_(x @ w)
    return (y @ w).sum()


def equal_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """sigmoid and a contiguous copy of its transpose are saved: the same bytes in another order."""
    y = (x @ w).sigmoid()
    return (y.t().contiguous() @ w).sum() + (y * y).sum()


def copy_of_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two copies in a row, and only the ends are saved: one is no single copy of the other."""
    y = (x @ w).sigmoid()
    return (y.t().contiguous().view(4, 16).t().contiguous().view(8, 8) @ w).sum() + (y * y).sum()


def saved_copies(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two copies in a row, all three saved; what is copied last is read first in the backward."""
    y = (x @ w).sigmoid()
    first = y.t().contiguous()
    second = first.view(4, 16).t().contiguous().view(8, 8)
    return ((first @ w).sin() @ (second @ w)).sum() + (y * y).sum()


def filled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Copied into a tensor that was made for it, repeated once and concatenated with nothing."""
    y = (x @ w).sigmoid()
    made = torch.empty(8, 8).copy_(y.t())
    one, alone = y.view(16, 4).t().repeat(1, 1).view(8, 8), torch.cat([y.view(4, 16)]).view(8, 8)
    return (made @ w).sum() + (one @ w).sum() + (alone @ w).sum() + (y * y).sum()


def widened(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Copied into a larger tensor, which repeats the row, and into one of another dtype: neither is a copy."""
    y = (x @ w).sigmoid()
    rows = torch.empty(8, 8).copy_(y[0])
    return (rows @ w).sum() + (torch.empty(8, 8, dtype=torch.float64).copy_(y) @ w.double()).sum() + (y * y).sum()


def written_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The first of two copies is written into before it is copied."""
    y = (x @ w).sigmoid()
    first = y.t().contiguous()
    first[0].mul_(2)
    return (first.view(4, 16).t().contiguous().view(8, 8) @ w).sum() + (y * y).sum()


def changed_copy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A copy that is written into is no copy any more."""
    y = (x @ w).sigmoid()
    z = y.t().clone()
    z.mul_(2)
    return (z @ w).sum() + (y * y).sum()


ALL: tuple[Toy, ...] = (
    relu_chain, shared_view, views_only, non_contiguous, tied_weight, saved_output, view_of_output, in_place,
    multi_output, expanded, dtype_view, dropout, half_precision, rounded, complex_numbers, lazy_negative, real_view,
    wide_dtype_view, part_of_an_element, float8, scalar, empty, saved_twice, unbound, unsafe_split, overlapping,
    view_of_input, narrow, slice_of_big_base, neighbouring_slices, scattered_slices, slice_with_steps,
    slice_of_permuted, slice_and_living_base, slice_that_is_reduced, gaps, equal_copy, copy_of_copy, changed_copy,
    saved_copies, filled, widened, written_between, equal_products,
)  # fmt: skip


def name(toy: Toy | str) -> str:
    """For the ids of tests."""
    return toy if isinstance(toy, str) else toy.__name__


def inputs(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, size, generator=generator).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def trained(toy: Toy, size: int = 8) -> Callable[[Compile], list[torch.Tensor]]:
    """A program (`tests/bitwise.py`): outputs and gradients."""

    def program(compile: Compile) -> list[torch.Tensor]:
        args = inputs(size)
        outputs = compile(toy)(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((o.float() * (k + 1)).sum() for k, o in enumerate(outputs))
        gradients = torch.autograd.grad(loss, args, allow_unused=True)  # type: ignore[arg-type]
        return [t.detach() for t in (*outputs, *gradients) if t is not None]

    return program


@dataclass
class Planned:
    """A toy's graphs after the pipeline, and its plan as text."""

    partition: Partition
    plan: Plan
    table: str
    before: Before


def options(machine: Machine = MACHINE, **changes: object) -> pipeline.PlanOptions:
    defaults: dict[str, object] = {
        "version": "tests",
        "budget": 0,
        "min_bytes": 0,
        "prefetch": 1 << 20,
        "rates": machine,
        "recompute": False,
        "slowdown": 0.0,
        "spare": False,
        "runtime_config": CONFIG,
    }
    return pipeline.PlanOptions(**(defaults | changes))  # type: ignore[arg-type]


def partitioned(toy: Toy, *args: torch.Tensor) -> Partition:
    """The forward and backward of `toy` that PyTorch's min-cut makes of its joint graph, before anything is decided.

    Without `args` of `inputs()`. Then a toy of `ALL` is compiled once in a process, and each call has its own copy.
    """
    if args or toy not in ALL:
        return _compiled(toy, *(args or inputs()))
    return _copy(_compiled_once(toy))


@functools.cache
def _compiled_once(toy: Toy) -> Partition:
    return _compiled(toy, *inputs())


def _copy(partition: Partition) -> Partition:
    """Other graphs, nodes and `meta` of the same names, which share the fake tensors: their storages tell aliases."""
    forward, backward = copy.deepcopy(partition.forward), copy.deepcopy(partition.backward)
    return replace(partition, forward=forward, backward=backward)


def _compiled(toy: Toy, *args: torch.Tensor) -> Partition:
    def cut(gm: torch.fx.GraphModule, joint_inputs: object, **kwargs: object) -> Partition:
        partition = pipeline.joint_of(gm, joint_inputs, kwargs).partition()  # type: ignore[arg-type]
        return replace(partition, activations=frozenset(), untrained=frozenset())

    return with_joint(toy, args, cut)


def with_joint(toy: Toy, args: tuple[torch.Tensor, ...], use: Callable[..., T]) -> T:
    """What `use` makes of the joint graph of `toy`; it is called as AOTAutograd calls a partitioner."""
    found: list[T] = []

    def capture(gm: torch.fx.GraphModule, joint_inputs: object, **kwargs: object) -> tuple[torch.fx.GraphModule, ...]:
        lift(gm.graph)
        found.append(use(gm, joint_inputs, **kwargs))
        raise _Captured

    torch._dynamo.reset()
    try:
        torch.compile(toy, backend=aot_autograd(fw_compiler=boxed_nop, partition_fn=capture), fullgraph=True)(*args)
    except Exception:
        if not found:
            raise
    return found[0]


def choosing(
    policies: Mapping[object, CheckpointPolicy], otherwise: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE
) -> Callable[[], object]:
    """The `context_fn` of a checkpoint that treats each operator by its policy."""

    def choose(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return policies.get(op, otherwise)

    return functools.partial(create_selective_checkpoint_contexts, choose)


def checkpointed(region: Toy, policies: Mapping[object, CheckpointPolicy]) -> Toy:
    """`region` in a checkpoint that recomputes all operators but those of `policies`."""
    contexts = choosing(policies)
    return lambda x, w: checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)


class _Captured(Exception):
    """Ends a compilation as soon as its partition was seen."""


def planned(toy: Toy, *args: torch.Tensor, **changes: object) -> Planned:
    """`toy` through the whole pipeline."""
    partition = partitioned(toy, *args)
    names = node_names(partition)
    before = Before.of(partition)
    chosen = options(**changes)
    plan = decide(partition, chosen)
    pipeline.rewrite(partition, plan, chosen)
    table = dump.table(plan, names)
    lines = table.splitlines()
    return Planned(partition, plan, "\n".join(line for line in lines[1:] if not line.startswith("predicted")), before)
