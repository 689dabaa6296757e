"""Every parallelism that PyTorch's own engine has computes with offload what it computes without, on every rank.

    make loops                                                  all of them
    pytest -m slow tests/distributed -k "aot_eager and DDP"     one

A launch trains in many modes, one after the other (`worker.py`), because every process takes seconds to import torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.compatibility import Result, record
from tests.distributed.launch import torchrun
from tests.distributed.modes import MODES
from tests.distributed.worker import AGREED, UNLIKE, Found
from tests.unlike import DYNAMIC_STAYS

pytestmark = pytest.mark.slow

FOUR = ("FSDP2 and tensor parallel",)  # ranks, the others two
QUICK = ("DDP, compiled outside", "FSDP2, graph per block", "sequence parallel", "pipeline, interleaved 1F1B")
QUICK += (f"tensor parallel{UNLIKE}",)
ALL = (*(name for name in MODES if name not in FOUR), f"tensor parallel{UNLIKE}", f"sequence parallel{AGREED}")


@dataclass(frozen=True)
class Job:
    inner: str
    modes: tuple[str, ...]
    ranks: int = 2


JOBS = {
    "quick": Job("aot_eager", QUICK),
    "other": Job("aot_eager", tuple(name for name in ALL if name not in QUICK)),
    "four": Job("aot_eager", FOUR, ranks=4),
    "inductor": Job("inductor", ALL),
    "inductor four": Job("inductor", FOUR, ranks=4),
}


def _marks(mode: str) -> list[pytest.MarkDecorator]:
    return [DYNAMIC_STAYS] if "interleaved" in mode else []  # whose micro-batches are of two sizes


CASES = [
    pytest.param(name, mode, id=f"{job.inner} {mode}", marks=_marks(mode))
    for name, job in JOBS.items()
    for mode in job.modes
]

_results: dict[str, list[Found]] = {}
_outputs: dict[str, str] = {}


def results(name: str, directory: Path) -> list[Found]:
    """What the ranks of a job wrote down, which is run once."""
    if name not in _results:
        job = JOBS[name]
        arguments = ("-m", "tests.distributed.worker", str(directory), job.inner, *job.modes)
        _, _outputs[name] = torchrun(*arguments, ranks=job.ranks, timeout_s=200 * (1 + len(job.modes)))
        lines = [line for path in directory.glob("rank*.jsonl") for line in path.read_text().splitlines()]
        _results[name] = [Found(**json.loads(line)) for line in lines]
    return _results[name]


@pytest.mark.parametrize(("job", "mode"), CASES)
def test_gradients_are_those_without_offload(job: str, mode: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    every = results(job, tmp_path_factory.mktemp("job"))
    found = sorted((each for each in every if each.mode == mode), key=lambda each: each.rank)
    assert [each.rank for each in found] == list(range(JOBS[job].ranks)), _outputs[job][-4000:]
    assert [each.difference for each in found] == [0.0] * len(found)
    assert all(each.near_plain for each in found)
    for each in found:
        _check_offload(each)
    sizes = sum(each.saved_bytes for each in found), sum(each.written_bytes for each in found)
    about, breaks = f"{mode}, {len(found)} ranks", found[0].graph_breaks
    record(Result("several processes", about, JOBS[job].inner, *sizes, graph_breaks=breaks))


def _check_offload(found: Found) -> None:
    if found.mode.endswith(UNLIKE):  # rank 0 was told of a slow drive, and computes again what the other loads
        assert (found.recomputed > 0) == (found.rank == 0)
    else:
        assert found.recomputed == 0
    if found.mode in MODES:
        assert found.offloaded_bytes >= (1.0 if found.inner == "aot_eager" else 0.9) * found.saved_bytes
        assert found.written_bytes > 0.5 * found.offloaded_bytes  # the rest was wanted again before it was written
        assert found.read_bytes > 0.5 * found.offloaded_bytes
    elif not found.recomputed:  # within a budget of one half, which what is computed again may make do with
        assert found.written_bytes > 0.25 * found.saved_bytes
