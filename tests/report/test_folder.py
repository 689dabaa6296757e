"""The numbered files of the option `dump`, and the code in them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ssd_fx
from ssd_fx.passes.partitioner import GRAPH_NAME
from ssd_fx.passes.stages import Stages
from ssd_fx.report.dump import marked, told_once
from ssd_fx.report.folder import with_code

TOY = {"engine": "memory", "machine": "default", "min_bytes": 0}


def train(dump: Path, **options: object) -> None:
    def toy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).relu() @ w).relu().sum()

    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    torch.compile(toy, backend=ssd_fx.backend, options={**TOY, **options, "dump": str(dump)})(x, w).backward()


def folder(dump: Path) -> Path:
    (found,) = (path for path in dump.iterdir() if path.is_dir())
    return found


def test_a_file_for_each_pass_that_changed_something(tmp_path: Path) -> None:
    train(tmp_path, inner="aot_eager")
    expected = ["00_joint", "01_merge_equal", "02_partition_forward", "03_partition_backward"]
    expected += ["04_insert_forward", "05_insert_backward"]
    assert sorted(path.stem for path in folder(tmp_path).iterdir()) == expected
    assert "ssd_fx" not in (folder(tmp_path) / "02_partition_forward.txt").read_text()
    inserted = (folder(tmp_path) / "04_insert_forward.txt").read_text()
    assert inserted.count("ssd_fx.store") == ssd_fx.stats().stores
    (code,) = tmp_path.glob("*.forward.py")
    assert code.read_text() == inserted


def test_the_options_of_the_runtime_are_told_once(tmp_path: Path) -> None:
    train(tmp_path, inner="aot_eager")
    for path in [*tmp_path.glob("*.forward.py"), folder(tmp_path) / "04_insert_forward.txt"]:
        text = path.read_text()
        assert text.count('"inflight":') == 1
        assert text.startswith("CONFIG = '{")
        assert text.count("CONFIG, '") == 1 + ssd_fx.stats().stores  # begin_, and the stores


def test_an_earlier_dump_of_the_same_graph_is_replaced(tmp_path: Path) -> None:
    train(tmp_path, inner="aot_eager")
    (folder(tmp_path) / "09_of_an_earlier_version.txt").touch()
    torch._dynamo.reset()
    train(tmp_path, inner="aot_eager")
    assert len(list(folder(tmp_path).iterdir())) == 6


@pytest.mark.slow
def test_the_code_of_inductor(tmp_path: Path) -> None:
    train(tmp_path)
    forward, backward = sorted(folder(tmp_path).glob("*_inductor_*.txt"))
    assert forward.name.endswith("_inductor_forward.txt")
    marks = re.findall(r"# <-- ssd_fx: (\w+)$", forward.read_text(), re.MULTILINE)
    stats = ssd_fx.stats()
    assert [marks.count(word) for word in ("begin", "store", "release")] == [1, stats.stores, stats.stores]
    marks = re.findall(r"# <-- ssd_fx: (\w+)$", backward.read_text(), re.MULTILINE)
    assert [marks.count(word) for word in ("load", "wait")] == [stats.loads, stats.loads]


def test_a_dump_that_is_removed_before_the_first_backward_is_made_again(tmp_path: Path) -> None:
    """Inductor compiles the backward then."""
    dump = tmp_path / "dump"
    gm = torch.fx.GraphModule({}, torch.fx.Graph())
    gm.meta[GRAPH_NAME] = "9bd39aac"
    with_code(str(dump), lambda *_, **__: SimpleNamespace(source_code="code"), gm, [], is_backward=True)
    assert (dump / "9bd39aac" / "00_inductor_backward.txt").read_text() == "code"


def test_marks() -> None:
    code = "a = ssd_fx_ops.store(x, CONFIG)\nassert_alignment(a, 'torch.ops.ssd_fx.store.default')\n"
    assert marked(code) == code.replace("CONFIG)\n", "CONFIG)  # <-- ssd_fx: store\n")
    through_dispatcher = "torch.ops.ssd_fx.wait_load_.default(a, h, 1)"
    assert marked(through_dispatcher) == through_dispatcher + "  # <-- ssd_fx: wait"


def test_the_plan_is_not_in_generated_code() -> None:
    packed = "eJ" * 60
    for call in ("ssd_fx_ops.begin_(x, 'c', 'g', 1, 2", "torch.ops.ssd_fx.begin_.default(x, 'c', 'g', 1, 2"):
        assert told_once(f"{call}, '{packed}', 0)\n", "") == f"{call})\n"


def test_code_without_options_stays() -> None:
    assert told_once("f(x)\n", "") == told_once("f(x)\n", "{}") == "f(x)\n"


def test_no_code_is_made_where_nobody_wants_it() -> None:
    stages = Stages(on=False)
    stages.after("joint", joint=None)  # type: ignore[arg-type]  # which has no code
    assert stages.found == {}
