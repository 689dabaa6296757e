"""The ways to train in several processes: each builds its model, compiles it and says what one step is.

A mode is given `how`, the arguments of `torch.compile`. It returns the modules that this rank trains, and a function
that runs the forwards and backwards of step number n and returns the losses that this rank knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.model import BATCH, Net, batch, loss_of

How = Mapping[str, Any]
Step = Callable[[int], list[Tensor]]
Mode = Callable[[How], tuple[nn.Module, Step]]

BUCKET = 100_000  # bytes of gradients in one of DDP's buckets: some for each of these small blocks
MICROBATCHES = 4


def seed(step: int, micro: int = 0) -> int:
    """Other data for every rank."""
    return 1000 * dist.get_rank() + 10 * step + micro


def once(model: Any) -> Step:
    """One batch a step."""

    def step(number: int) -> list[Tensor]:
        tokens, targets = batch(seed(number))
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return [loss]

    return step


def accumulated(model: Any, sync: Callable[[bool], None]) -> Step:
    """Two batches in flight whose gradients stay here, then one whose backward exchanges those of all three."""

    def step(number: int) -> list[Tensor]:
        sync(False)
        data = [batch(seed(number, micro)) for micro in range(3)]
        losses = [loss_of(model(tokens), targets) for tokens, targets in data[:2]]
        for loss in reversed(losses):
            loss.backward()
        sync(True)
        losses.append(loss_of(model(data[2][0]), data[2][1]))
        losses[-1].backward()
        return losses

    return step


def in_buckets(model: nn.Module) -> DistributedDataParallel:
    dist._DEFAULT_FIRST_BUCKET_BYTES = BUCKET  # of the first, which may not be larger than the others
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)


def ddp(how: How) -> tuple[nn.Module, Step]:
    """Compiled with DDP around it: Dynamo cuts the graph where DDP's buckets end."""
    model = Net()
    return model, once(torch.compile(in_buckets(model), **how))


def ddp_inside(how: How) -> tuple[nn.Module, Step]:
    """DDP around what is compiled, which happens in its forward: Dynamo cuts the graph all the same."""
    model = Net()
    return model, once(in_buckets(torch.compile(model, **how)))


def ddp_whole(how: How) -> tuple[nn.Module, Step]:
    """Compiled with DDP around it, and not cut."""
    model = Net()
    torch._dynamo.config.optimize_ddp = False  # the worker puts it back
    return model, once(torch.compile(in_buckets(model), **how))


def ddp_accumulated(how: How) -> tuple[nn.Module, Step]:
    model = Net()
    parallel = in_buckets(model)

    def sync(wanted: bool) -> None:
        parallel.require_backward_grad_sync = wanted  # what `no_sync()` sets

    return model, accumulated(torch.compile(parallel, **how), sync)


def fsdp_blocks(how: How) -> tuple[nn.Module, Step]:
    """A graph per block; computed in bfloat16, gathered again for the backward."""
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for block in model.blocks:
        block.compile(**how)
        fully_shard(block, mp_policy=policy)
    fully_shard(model)
    return model, once(model)


def fsdp_whole(how: How) -> tuple[nn.Module, Step]:
    """`torch.compile` of the root: Dynamo breaks the graph at every module that is sharded."""
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, once(torch.compile(model, **how))


def fsdp_accumulated(how: How) -> tuple[nn.Module, Step]:
    """The parameters stay gathered between forward and backward; gradients are exchanged with the last batch."""
    model = Net()
    for block in model.blocks:
        block.compile(**how)
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model)
    return model, accumulated(model, model.set_requires_gradient_sync)


COLUMNS_AND_ROWS = {
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def same_data(model: Any) -> Step:
    """One batch a step, the same on every rank."""

    def step(number: int) -> list[Tensor]:
        tokens, targets = batch(number)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return [loss]

    return step


def tensor_parallel(how: How) -> tuple[nn.Module, Step]:
    """Heads and the inner width are sharded, the rest is on every rank."""
    model = Net(dropout=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, COLUMNS_AND_ROWS)
    return model, same_data(torch.compile(model, **how))


SEQUENCE = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "norm2": SequenceParallel(),
    **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def tensor_parallel_blocks(how: How, mesh: Any = None) -> tuple[nn.Module, Step]:
    """A graph per block: what goes from one to the next are results of collectives that may still be under way."""
    model = Net(dropout=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for block in model.blocks:
        parallelize_module(block, mesh, COLUMNS_AND_ROWS)
        block.compile(**how)
    return model, same_data(model)


def sequence_parallel(how: How) -> tuple[nn.Module, Step]:
    """Between the products the sequence is sharded too: gathered before them, scattered behind.

    The whole model is compiled: torch 2.13 fails with a graph per block here, with its own backends too.
    """
    model = Net(dropout=0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, SEQUENCE)
    return model, same_data(torch.compile(model, **how))


def pipeline(how: How, schedule: str, stages_per_rank: int) -> tuple[nn.Module, Step]:
    """Every stage is a graph of its own, which runs for some microbatches before the first backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * stages_per_rank
    numbers = range(rank, count, world)
    parts = nn.ModuleList(Net(blocks=1, first=n == 0, last=n == count - 1) for n in numbers)
    stages = [
        PipelineStage(torch.compile(part, **how), n, count, torch.device("cpu"))
        for n, part in zip(numbers, parts, strict=True)
    ]
    made: Any = schedules.get_schedule_class(schedule)
    runs = made(stages if stages_per_rank > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of)

    def step(number: int) -> list[Tensor]:
        tokens, targets = batch(number, rows=MICROBATCHES * BATCH)
        losses: list[Tensor] = []
        runs.step(*([tokens] if rank == 0 else []), **({"target": targets} if rank == world - 1 else {}), losses=losses)
        return losses

    return parts, step


def gpipe(how: How) -> tuple[nn.Module, Step]:
    return pipeline(how, "GPipe", 1)


def one_forward_one_backward(how: How) -> tuple[nn.Module, Step]:
    return pipeline(how, "1F1B", 1)


def interleaved(how: How) -> tuple[nn.Module, Step]:
    return pipeline(how, "Interleaved1F1B", 2)


def fsdp_and_tensor_parallel(how: How) -> tuple[nn.Module, Step]:
    """Two by two ranks: sharded over one dimension of the mesh, parallel in tensors over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
    model, step = tensor_parallel_blocks(how, mesh["tensor"])
    assert isinstance(model, Net)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, step


MODES: dict[str, Mode] = {
    "DDP, compiled outside": ddp,
    "DDP, compiled inside": ddp_inside,
    "DDP, one graph": ddp_whole,
    "DDP, accumulation": ddp_accumulated,
    "FSDP2, graph per block": fsdp_blocks,
    "FSDP2, whole model": fsdp_whole,
    "FSDP2, accumulation": fsdp_accumulated,
    "tensor parallel": tensor_parallel,
    "tensor parallel, graph per block": tensor_parallel_blocks,
    "sequence parallel": sequence_parallel,
    "pipeline, GPipe": gpipe,
    "pipeline, 1F1B": one_forward_one_backward,
    "pipeline, interleaved 1F1B": interleaved,
    "FSDP2 and tensor parallel": fsdp_and_tensor_parallel,
}
