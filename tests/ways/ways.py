"""What the tests of ways of working share: packages that may not be installed, and two ranks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import ssd_fx
from tests.bitwise import Compile, differences, kept, ours, run
from tests.compatibility import Result, record
from tests.distributed.launch import torchrun
from tests.loops.loops import current_test, on_disk

SAID = re.compile(r"rank (\d): same (\w+), (\d+) values, (\d+) stores, (\d+) loads, (\d+) saved, (\d+) written")


def installed(module: str) -> Any:
    """The module, or a skip without its package. A package that lacks another one is an error: nobody would run it."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip("make ways installs it", allow_module_level=True)
    return importlib.import_module(module)


def compare_on_a_rank(train: Callable[[Compile], list[Tensor]], directory: str) -> None:
    """What `train` returns with everything kept and with everything on disk, and prints how they compare."""
    options = on_disk(Path(directory), recompute=False)
    expected, found = (run(train, compile) for compile in (kept(options), ours(options)))
    same = differences(found, expected) == {}
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
