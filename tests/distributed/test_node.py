"""Two ranks of one node: each has its files, its share and its dump; they measure in turn; a dead one leaves nothing.

One launch, in which a rank dies by SIGKILL in the middle of a step; torchrun ends the other by SIGTERM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ssd_fx.runtime.engines.extents import STEP
from tests.distributed.launch import torchrun
from tests.distributed.node import DYING, MEASURES_S

pytestmark = pytest.mark.slow

RANKS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of a job that is over, and what its ranks said while they lived."""
    out = tmp_path_factory.mktemp("node")
    (out / "no_directory").write_text("what should be a directory")
    directories = [out / "a", out / "b"]
    for directory in directories:
        directory.mkdir()
    status, output = torchrun("-m", "tests.distributed.node", *map(str, (out, *directories)))
    assert status == 1, output[-4000:]
    assert "SIGKILL" in output, output[-4000:]
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_writes_to_its_directory(job: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = job
    files = [{Path(path).name: nbytes for path, nbytes in rank["files"].items()} for rank in ranks]
    assert [list(each) for each in files] == [["a"], ["b"]]
    assert all(nbytes == STEP for each in files for nbytes in each.values())  # preallocated
    assert ranks[0]["left"] == ranks[1]["left"] != 0  # the same graph


def test_every_rank_dumps_its_plan(job: tuple[Path, list[dict[str, Any]]]) -> None:
    out, _ = job
    for rank, directory in enumerate("ab"):
        (plan,) = (out / "dump" / f"rank{rank}").glob("*.plan.txt")
        head = f"rank {rank} of 2 on this node: writes to {out}/{directory}, whose bandwidth 2 ranks share; "
        assert plan.read_text().splitlines()[0] == f"{head}host_budget 0 B, disk_limit 0 B"


def test_one_rank_measures_and_the_other_reads(job: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = job
    assert sorted(len(rank["kept"]) for rank in ranks) == [0, 2]  # compute and disk


def test_ranks_that_must_both_measure_do_so_in_turn(job: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = job
    spans = sorted(_whole(rank["unkept"]) for rank in ranks)
    assert all(end - start >= 2 * MEASURES_S for start, end in spans)
    assert spans[0][1] <= spans[1][0]


def test_a_rank_that_dies_leaves_no_file(job: tuple[Path, list[dict[str, Any]]]) -> None:
    """Nor does the one that torchrun ends: neither had a name in the directory, and nobody holds it open."""
    out, ranks = job
    assert ranks[DYING]["stored"] != 0
    assert [list((out / name).iterdir()) for name in "ab"] == [[], []]
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank["pid"], 0)


def _whole(spans: Sequence[Sequence[float]]) -> tuple[float, float]:
    return min(start for start, _ in spans), max(end for _, end in spans)
