"""Small functions, each named for the hazard that its graph holds, and the way from one to its plan.

Every toy takes CPU tensors that require grad, and returns one tensor; `T` is the 8 x 8 input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from ssd_fx.passes import dump, pipeline
from ssd_fx.passes.before import Before
from ssd_fx.passes.costs import Machine
from ssd_fx.passes.marks import lift
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.plan import Plan

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


def complex_numbers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Complex activations, whose conjugates are lazy."""
    z = torch.complex(x @ w, x)
    return (z @ z.conj().t()).abs().sum()


ALL: tuple[Toy, ...] = (
    relu_chain, shared_view, views_only, non_contiguous, tied_weight, saved_output, view_of_output, in_place,
    multi_output, expanded, dtype_view, dropout, half_precision, complex_numbers,
)  # fmt: skip


def inputs(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, size, generator=generator).requires_grad_() for _ in range(2))  # type: ignore[return-value]


@dataclass
class Planned:
    """A toy's graphs after the pipeline, and its plan as text."""

    partition: Partition
    plan: Plan
    table: str
    before: Before


def options(**changes: object) -> pipeline.PlanOptions:
    defaults: dict[str, object] = {"budget": 0, "min_bytes": 0, "prefetch": 1 << 20, "machine": MACHINE}
    defaults |= {"runtime_config": CONFIG, "hand_over": True}
    return pipeline.PlanOptions(**(defaults | changes))  # type: ignore[arg-type]


def partitioned(toy: Toy, *args: torch.Tensor) -> Partition:
    """The forward and backward of `toy` as PyTorch's min-cut partitions them, untouched but for marks."""
    found: list[Partition] = []

    def capture(gm: torch.fx.GraphModule, joint_inputs: object, **kwargs: object) -> tuple[torch.fx.GraphModule, ...]:
        lift(gm.graph)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        found.append(Partition(forward, backward, int(kwargs["num_fwd_outputs"])))  # type: ignore[call-overload]
        raise _Captured

    torch._dynamo.reset()
    try:
        torch.compile(toy, backend=aot_autograd(fw_compiler=boxed_nop, partition_fn=capture), fullgraph=True)(*args)
    except Exception:
        if not found:
            raise
    return found[0]


class _Captured(Exception):
    """Ends a compilation as soon as its partition was seen."""


def planned(toy: Toy, *args: torch.Tensor, **changes: object) -> Planned:
    """`toy` through the whole pipeline."""
    partition = partitioned(toy, *(args or inputs()))
    names = [[n.name for n in m.graph.nodes] for m in (partition.forward, partition.backward)]
    before = Before.of(partition)
    plan = pipeline.run(partition, options(**changes), consume=True)
    table = dump.table(plan, *names)
    lines = table.splitlines()
    return Planned(partition, plan, "\n".join(line for line in lines[1:] if not line.startswith("predicted")), before)
