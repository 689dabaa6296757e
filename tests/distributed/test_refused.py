"""What PyTorch refuses of compiled modules, whoever compiles them: told in the table, and noticed when it changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.compatibility import Result, record
from tests.distributed.model import Net, loss_of

RANKS = 2
# The number of this rank's second stage of 4: ranks take turns, or the stages go forth and back.
SECOND = {"InterleavedZeroBubble": 2, "ZBVZeroBubble": 3, "DualPipeV": 3}


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SECOND)
def test_schedules_that_split_the_backward(name: str) -> None:
    parts = [torch.compile(Net(blocks=1), backend="eager") for _ in range(2)]
    numbers = (0, SECOND[name])
    stages = [PipelineStage(part, n, 4, torch.device("cpu")) for n, part in zip(numbers, parts, strict=True)]
    with pytest.raises(RuntimeError, match=r"not supported with stage modules that have used torch.compile"):
        schedules.get_schedule_class(name)(stages, n_microbatches=4, loss_fn=loss_of)
    for inner in ("aot_eager", "inductor"):
        record(Result("several processes", f"pipeline, {name}", inner, reason="PyTorch refuses compiled stages"))
