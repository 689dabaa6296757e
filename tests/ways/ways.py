"""What the tests of ways of working share: options where only a backend's name is passed on, and two ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ssd_fx
from tests.compatibility import Result, record
from tests.distributed.launch import torchrun
from tests.loops.loops import Compile, current_test

SAID = re.compile(r"rank (\d): same (\w+), (\d+) values, (\d+) stores, (\d+) loads, (\d+) saved, (\d+) written")


@contextmanager
def by_name(compile: Compile) -> Iterator[str]:
    """The name of the backend; its options are in the environment meanwhile."""
    how = compile.keywords  # type: ignore[attr-defined]
    options = how.get("options", {}).items()
    texts = {f"SSD_FX_{name.upper()}": ":".join(x) if isinstance(x, list) else str(x) for name, x in options}
    with mock.patch.dict(os.environ, texts):
        yield how["backend"]


def compare_on_a_rank(train: Callable[[Compile], list[Tensor]], directory: str) -> None:
    """What `train` returns with everything kept and with everything on disk, and prints how they compare."""
    torch.use_deterministic_algorithms(True)
    options: dict[str, Any] = {"dirs": [directory], "inner": "aot_eager", "budget": 0, "min_bytes": 0}
    options["recompute"] = False
    kept = train(partial(torch.compile, backend="ssd_fx", options=options | {"budget": 1.0}))
    ssd_fx.reset_stats()
    found = train(partial(torch.compile, backend="ssd_fx", options=options))
    same = all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
    stats = ssd_fx.stats()
    moved = f"{stats.stores} stores, {stats.loads} loads, {stats.saved_bytes} saved, {stats.written_bytes} written"
    print(f"rank {dist.get_rank()}: same {same}, {len(found)} values, {moved}", flush=True)


def assert_two_ranks_agree(module: str, directory: Path, argument: str, values: int, **environment: str) -> None:
    """Two processes of `module` that call `compare_on_a_rank`. `values`: how many tensors each compares."""
    status, output = torchrun("-m", module, str(directory), argument, ranks=2, timeout_s=300, **environment)
    assert status == 0, output[-4000:]
    found = SAID.findall(output)
    assert sorted(each[:3] for each in found) == [(rank, "True", str(values)) for rank in "01"], output[-4000:]
    assert all(int(stores) and stores == loads for _, _, _, stores, loads, _, _ in found)
    saved, written = (sum(int(each[i]) for each in found) for i in (5, 6))
    record(Result("ways of working", current_test(), "aot_eager", saved, written))
