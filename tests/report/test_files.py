"""The files: the page needs nothing else, a trace gives the same report, and bad input leaves nothing behind."""

from __future__ import annotations

import html
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx.cli import main
from ssd_fx.report.command import read
from ssd_fx.report.model import GraphReport
from ssd_fx.report.page import data, page
from ssd_fx.report.report import Report, made
from ssd_fx.runtime.plans import pack, unpack
from tests import fresh
from tests.report.trained import train


def test_the_page_needs_nothing_else(found: Report) -> None:
    text = page(found)
    assert len(text.encode()) < 2 << 20
    own = text.replace((Path(ssd_fx.__file__).parent / "report" / "web" / "echarts.min.js").read_text(), "")
    assert re.findall(r"(?:src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttpRequest", own) == []
    assert "/*{" not in own


def test_a_name_cannot_end_the_script(found: Report) -> None:
    told = json.loads(json.dumps(unpack(found.graphs[0].packed())).replace("trained.py", "</script><b>"))
    assert "</script><b>" not in page(made([GraphReport.unpacked(pack(told))], found.order))


def test_in_a_notebook(found: Report) -> None:
    frame = found._repr_html_()
    (inside,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(inside) == page(found)


def test_predicted_and_measured_lanes_fill_the_step(found: Report) -> None:
    shown = data(found)
    forward, backward = shown["own"]["compute"]
    busy = sum(end - begin for begin, end in [*forward, *backward])
    waits = sum(end - begin for begin, end in shown["own"]["waits"])
    assert busy + waits == pytest.approx(shown["own"]["end"], abs=0.02)
    assert len(shown["measured"]["writes"]) == len(shown["measured"]["reads"]) == 4


def test_a_trace_gives_the_same_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train()
    ssd_fx.export_trace(tmp_path / "trace.json")
    live = ssd_fx.report()
    del model
    again = read(tmp_path / "trace.json")
    assert again.order == live.order
    assert again.rows() == live.rows()
    assert main(["report", str(tmp_path / "trace.json"), "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == str(live).splitlines()[3:]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_trace_names_modules(trace: Path) -> None:
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert any(re.fullmatch(r"store blocks\.1 trained\.py:\d+", name) for name in names)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": []}', '{"traceEvents": [], "ssd_fx": {"plans": 3}}'])
def test_a_broken_trace(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text(text)
    assert main(["report", str(tmp_path / "trace.json"), "-o", str(tmp_path / "report.html")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "trace.json is no trace of ssd_fx; right would be a file that ssd_fx.export_trace(path) wrote" in line
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("key", ["rows", "stock", "predicted", "graph"])
def test_a_trace_of_another_version(key: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, told = tmp_path / "trace.json", json.loads(trace.read_text())
    for graph, about in told["ssd_fx"]["plans"].items():
        plan = unpack(about)
        told["ssd_fx"]["plans"][graph] = pack({name: each for name, each in plan.items() if name != key})
    path.write_text(json.dumps(told))
    assert main(["report", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "trace.json is no trace of ssd_fx; " in line
    assert f"(no '{key}')" in line


def test_a_trace_before_any_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    ssd_fx.reset_stats()
    ssd_fx.export_trace(tmp_path / "trace.json")
    assert main(["report", str(tmp_path / "trace.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no step: nothing ran" in line


def test_a_directory_instead_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"ssd-fx: {tmp_path}: Is a directory\n"


def test_a_page_in_a_directory_that_is_missing(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "missing" / "report.html"
    assert main(["report", str(trace), "-o", str(page)]) == 1
    assert capsys.readouterr().err == f"ssd-fx: {page}: No such file or directory\n"


def test_a_page_that_cannot_be_written(found: Report, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        found.save(tmp_path / "taken")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def test_a_page_for_this_directory_is_an_error_of_the_system(
    found: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.` has no name to make another one of."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"'\.'$"):
        found.save(".")
    assert [*tmp_path.iterdir()] == []


def test_a_page_behind_a_link_leaves_the_link(found: Report, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link.html").symlink_to("real/report.html")
    for _ in range(2):  # the link leads nowhere at first
        found.save(tmp_path / "link.html")
        assert (tmp_path / "link.html").is_symlink()
        assert (tmp_path / "real" / "report.html").read_text(encoding="utf-8") == page(found)


def test_a_page_for_a_pipe_goes_through_it(found: Report) -> None:
    """As of `-o /dev/stdout`. What is no file must not be replaced with one."""
    read_end, write_end = os.pipe()
    with ThreadPoolExecutor(1) as reader:
        got = reader.submit(os.fdopen(read_end, "rb").read)
        try:
            found.save(f"/proc/self/fd/{write_end}")
        finally:
            os.close(write_end)
    assert got.result().decode() == page(found)


NAMED = r"""
import sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module=r"ssd_fx\.report\.(page|folder)$")
import torch, ssd_fx
def toy(größe, w):
    return ((größe @ w).relu() @ w).relu().sum()
options = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0, "dump": sys.argv[1]}
x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
torch.compile(toy, backend=ssd_fx.backend, options=options)(x, w).backward()
ssd_fx.report().save(sys.argv[1] + "/report.html")
"""


def test_page_and_dump_are_the_same_in_every_locale(tmp_path: Path) -> None:
    """Python warns of files that are in the encoding of the locale. torch itself compiles nothing in that of C."""
    done = fresh.run(NAMED, tmp_path)
    assert done.returncode == 0, done.stderr
    (plan,) = tmp_path.glob("*.plan.txt")
    assert "argument größe" in plan.read_text(encoding="utf-8")


SCRIPT = """
import torch, ssd_fx
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
model = torch.compile(model, backend=ssd_fx.backend, options={"engine": "memory", "machine": "default", "min_bytes": 0})
model(torch.randn(64, 64)).sum().backward()
raise AssertionError("it trains")
"""


def test_a_script_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["explain", str(tmp_path / "train.py"), "--budget", "0.5", "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("memory  peak ")
    assert (tmp_path / "report.html").exists()
    assert main(["explain", str(tmp_path / "none.py"), "-o", str(tmp_path / "other.html")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.py' is no file" in line
    assert not (tmp_path / "other.html").exists()


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
    def forward(self, tokens):
        return self.inner(tokens).sigmoid()
model = Net()
"""


def test_a_script_names_the_arguments_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [NET.strip() if "Sequential" in line else line for line in SCRIPT.splitlines()]
    (tmp_path / "train.py").write_text("\n".join(lines))
    assert main(["explain", str(tmp_path / "train.py"), "-o", str(tmp_path / "report.html")]) == 0
    assert "argument tokens of Net.forward train.py:8" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_writes_all_that_docs_show(tmp_path: Path) -> None:
    sizes = ("--layers", "2", "--steps", "3", "--keep-hidden")
    done = fresh.ended("examples/report.py", "--dir", tmp_path, "--out", tmp_path / "out", *sizes)
    assert [line.split()[0] for line in done.stdout.splitlines()[:5]] == ["memory", "cost", "drive", "plan", "next"]
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"report.html", "report.txt", "trace.json"}


def test_a_picture(found: Report) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    memory, lanes = found.plot().axes
    assert [text.get_text() for text in memory.get_legend().get_texts()][:2] == ["without ssd_fx", "with, predicted"]
    assert len(lanes.get_yticks()) == 6
