"""`ssd-fx fit script.py`: a script runs up to the first step of the model that it compiles, and ends there."""

from __future__ import annotations

import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_fx import cli
from ssd_fx.fake import LARGE_BYTES, FakeLarge
from ssd_fx.hardware import MACHINES
from ssd_fx.runtime.memory.gauge import CpuGauge
from tests import fresh

TRAIN = """
import sys, torch, ssd_fx
from torch import nn

width, rows = int(sys.argv[1]), int(sys.argv[2])
data = torch.arange(64).remainder(10)
assert data.max().item() == 9, "small tensors have data"
model = nn.Sequential(nn.Embedding(10, width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
options = {"engine": "memory", "machine": "default", "min_bytes": 0}
compiled = torch.compile(model, backend=ssd_fx.backend, options=options)
with torch.no_grad():
    assert compiled(data[:1]).shape == (1, 10)
print("starts to train")
try:
    loss = compiled(data[:rows]).square().mean()
    loss.backward()
    open("trained", "w").close()
except Exception:
    pass
finally:
    open("ended", "w").close()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def fit(*words: str) -> int:
    return cli.main(["fit", "train.py", *words])


def test_a_script_and_its_arguments(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """It ends at its first step, as by an exception that it cannot take for an error. What it prints is no result."""
    before = (torch.compile, torch.optim.Optimizer.__init__, list(sys.argv), list(sys.path))
    assert fit("--budget", "0,0.5,64KiB", "--memory", "1MiB", "--json", "--", "64", "8") == 0
    out, err = capsys.readouterr()
    assert "starts to train" in err
    assert (folder / "ended").exists()
    assert not (folder / "trained").exists()
    assert (torch.compile, torch.optim.Optimizer.__init__, list(sys.argv), list(sys.path)) == before
    (found,) = json.loads(out)
    parameters = 4 * (10 * 64 + 64 * 64 + 64 + 10 * 64 + 10)
    assert found["batch"] == 8
    assert found["input_bytes"] == parameters + 64 * 8, "the batch is a view"
    assert found["state_bytes"] == pytest.approx(2 * parameters, abs=64)
    assert [row["budget"] for row in found["predictions"]] == [0, 0.5, 65536, "memory"]
    assert found["fastest"] in [0, 0.5, 65536, "memory"]


def test_the_table_of_several_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--budget", "0", "--batch", "8, 16", "--drive-tbw", "600", "--", "64", "4") == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("graph")]
    assert [head.split(";")[0].split(": ")[1].split(",")[0] for head in heads] == ["batch 8", "batch 16"]


def test_a_model_larger_than_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of 40 GB each. Nothing fits the memory, which is a result and a status."""
    assert fit("--budget", "0,1.0", "--memory", "8GiB", "--no-rivals", "--", "100000", "8") == 2
    out = capsys.readouterr().out
    assert out.count("too large") == 2
    assert "none fits 8 GiB: the least is " in out


def test_a_block_that_is_compiled_in_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`model.compile` and decorators come to torch.compile too. Of torch's own modules `model.compile` takes none."""
    in_place = "compiled = model; model.compile("
    (folder / "train.py").write_text(TRAIN.replace("compiled = torch.compile(model, ", in_place))
    assert fit("--budget", "0", "--", "64", "8") == 1
    assert "torch.compile compiles nothing of what train.py calls to train" in capsys.readouterr().err
    own = (
        "class Own(nn.Sequential):\n    forward = lambda self, x: super(Own, self).forward(x)\nmodel.__class__ = Own\n"
    )
    (folder / "train.py").write_text(TRAIN.replace("compiled = torch.compile(model, ", own + in_place))
    assert fit("--budget", "0", "--", "64", "8") == 0
    decorated = "@torch.compile(backend='ssd_fx', options=options)\ndef compiled(x):\n    return model(x)\n"
    line = "compiled = torch.compile(model, backend=ssd_fx.backend, options=options)\n"
    (folder / "train.py").write_text(TRAIN.replace(line, decorated))
    assert fit("--budget", "0", "--", "64", "8") == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("0 "))
    assert first == second


PLAIN = """import torch
model = torch.nn.Linear(512, 512)
for _ in range(2):
    loss = model(torch.randn(4096, 512)).square().sum()
    loss.backward()
    print(loss.item())
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_script_that_does_not_use_ssd_fx(folder: Path, capsys: pytest.CaptureFixture[str], compiled: bool) -> None:
    """What is wrong is not that it prints its loss."""
    plain = PLAIN.replace("nn.Linear(512, 512)", "compile(torch.nn.Linear(512, 512), backend='aot_eager')")
    (folder / "train.py").write_text(plain if compiled else PLAIN)
    assert fit("--budget", "0") == 1
    said = "ssd-fx: train.py compiled no model with ssd_fx, and trains until train.py:6 without it; right would be"
    assert said in capsys.readouterr().err


def test_a_recurrent_network_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dynamo skips it, however it is compiled."""
    lines = "model = torch.nn.LSTM(64, 64)\ncompiled = torch.compile(model, backend='ssd_fx')\n"
    (folder / "train.py").write_text(f"import torch\n{lines}compiled(torch.randn(8, 4, 64))[0].sum().backward()\n")
    assert fit("--budget", "0") == 1
    assert "It skips a model with nn.LSTM, nn.GRU or nn.RNN (right would be" in capsys.readouterr().err


COMPILED = "backend=ssd_fx.backend, options=options"


def test_a_backend_with_its_options_bound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`functools.partial` around the backend trains as well; what torch.compile is given goes first, as there."""
    assert fit("--budget", "0", "--", "64", "8") == 0
    for words in ("options=options)", "options={'bugdet': 0}), options=options"):
        changed = TRAIN.replace(COMPILED, f"backend=functools.partial(ssd_fx.backend, {words}")
        (folder / "train.py").write_text("import functools\n" + changed)
        assert fit("--budget", "0", "--", "64", "8") == 0
    first, *others = (line for line in capsys.readouterr().out.splitlines() if line.startswith("0 "))
    assert others == [first, first]


def test_a_compilation_that_is_turned_off_is_none_of_ours(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model would train eagerly, and keep what the estimate says is offloaded."""
    (folder / "train.py").write_text(TRAIN.replace(COMPILED, f"{COMPILED}, disable=True"))
    assert fit("--budget", "0", "--", "64", "8") == 1
    assert "train.py compiled no model with ssd_fx; right would be" in capsys.readouterr().err


def test_what_a_process_of_the_script_prints_is_no_result(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("import os\nos.system('echo of a child')\n" + TRAIN)
    assert fit("--budget", "0", "--json", "--", "64", "8") == 0
    out, err = capfd.readouterr()
    assert len(json.loads(out)) == 1
    assert "of a child" in err


def test_a_path_without_the_folder_of_the_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONSAFEPATH=1 the first folder is one of the user's, where the script finds its modules."""
    (folder / "lib").mkdir()
    (folder / "lib" / "only_there.py").write_text("")
    (folder / "train.py").write_text("import only_there\n" + TRAIN)
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith("_")}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags | {"safe_path": True}))
    monkeypatch.syspath_prepend(folder / "lib")
    assert fit("--budget", "0", "--", "64", "8") == 0


COMPILE = "import torch, ssd_fx\nf = torch.compile(lambda x: x.sin(), backend=ssd_fx.backend)\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "",
            "train.py compiled no model with ssd_fx; right would be torch.compile(model, backend=ssd_fx.backend) in it",
        ),
        ("import torch\ntorch.compile(lambda x: x)(torch.ones(2))", "train.py compiled no model with ssd_fx; right"),
        (COMPILE, "train.py never called its compiled model outside torch.no_grad(); right would be to train it"),
        (
            "\n1 / 0",
            "train.py:2 failed before it trained: ZeroDivisionError: division by zero; right would be a script",
        ),
        ("def f(", "train.py failed before it trained: SyntaxError: "),
        ("import sys\nsys.exit(3)", "train.py:2 ended before it trained, with status 3; its arguments go behind `--`"),
        (COMPILE + "f(torch.ones(2))", "the model has no backward; right would be"),
        (
            "import torch\ntorch.ones(1000, 1000).sum().item()",
            "train.py:2 failed before it trained: DataDependentOutput",
        ),
        (
            COMPILE.replace("ssd_fx.backend", "ssd_fx.backend, options={'bugdet': 1}") + "f(torch.ones(2))",
            "ssd_fx has no option 'bugdet'; did you mean 'budget'",
        ),
    ],
)
def test_a_script_that_cannot_be_estimated(
    script: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(script)
    assert fit() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ssd-fx: {said}")
    assert err.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "512"], "option budget='512' has no unit: of what? Right would be '512MiB'"),
        (["--budget", "1"], "option budget='1' has no unit: of what? Right would be '1MiB'"),
        (["--budget", "0,"], "option budget='' is not a budget; right would be"),
        (["--batch", "x"], "batch='x' is no batch size; right would be a number above 0"),
        (["--memory", "8"], "memory='8' has no unit; right would be e.g. '8GiB'"),
        (["--drive-tbw", "lots"], "option drive_tbw='lots' is no number of TB; right would be e.g. 600"),
    ],
)
def test_a_wrong_flag(words: list[str], said: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert fit(*words, "--", "64", "8") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"ssd-fx: {said}")
    assert err.count("\n") == 1
    assert not (folder / "ended").exists(), "the script did not start"


def test_a_script_that_is_interrupted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text("raise KeyboardInterrupt")
    assert fit() == 130
    assert capsys.readouterr() == ("", "")


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", "missing.py"]) == 1
    assert capsys.readouterr().err == "ssd-fx: 'missing.py' is no file; right would be a Python script that trains\n"


def test_large_tensors_have_no_data_and_small_ones_do() -> None:
    def is_fake(x: torch.Tensor) -> Any:
        return type(x).__name__ == "FakeTensor"

    elements = LARGE_BYTES // 4
    read = torch.ones(2 * elements)
    with FakeLarge():
        large, small = torch.rand(elements), torch.rand(elements - 1)
        assert [is_fake(large), is_fake(small), is_fake(large[:1] + small[:1])] == [True, False, True]
        assert (read * 2).sum().item() == 4 * elements, "what was there before has data"
        assert torch.tensor([3]).tolist() == [3]
        assert is_fake(torch.nn.Linear(1024, 1024).double().weight)
    assert not is_fake(torch.rand(elements))


IN_PLACE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def forward(self, x, labels=None):
        return (self.down(self.up(x).relu()) - labels).square().mean()
model = Model()
model.compile(backend="ssd_fx", options={"engine": "memory", "machine": "default", "min_bytes": 0})
x = torch.randn(32, 64)
model(x, labels=x).backward()
"""


@pytest.mark.parametrize("command", ["fit", "explain"])
def test_a_model_of_ones_own_that_is_compiled_in_place(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its call must not come back to the stand-in for what was compiled; the figures are those of torch.compile."""
    (folder / "train.py").write_text(IN_PLACE)
    assert cli.main([command, "train.py", "--json"]) == 0
    (folder / "train.py").write_text(IN_PLACE.replace("model.compile(", "model = torch.compile(model, "))
    first = capsys.readouterr().out
    assert cli.main([command, "train.py", "--json"]) == 0
    assert first == capsys.readouterr().out


BLOCKS = """
import sys, torch, ssd_fx
from torch import nn
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR

WAY, WIDTH = sys.argv[1], 64
OURS = {"backend": "ssd_fx", "options": {"engine": "memory", "machine": "default", "min_bytes": 0, "budget": 0}}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Head(nn.Sequential):
    def forward(self, x):
        return super().forward(x)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = Head(nn.Linear(WIDTH, 256), nn.Tanh())
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = shared(block, x) if WAY == "shared" else block(x)
        if WAY == "broken":
            torch._dynamo.graph_break()
        return self.head(x)

def shared(block, x):
    return block(x)

model = Model()
if WAY == "shared":  # one compiled function, called for every block
    shared = torch.compile(shared, **OURS)
if WAY == "broken":
    model = torch.compile(model, **OURS)
if WAY in ("blocks", "blocks and head"):
    for block in model.blocks:
        block.compile(**OURS)
if WAY == "wrapped":
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **OURS)
if WAY == "blocks and head":
    model.head.compile(**OURS)
x = torch.randn(512, WIDTH)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
trained = ssd_fx.report()
"""
WAYS = {"blocks": [4], "wrapped": [4], "shared": [4], "blocks and head": [1, 4], "broken": [1, 1]}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_several_graphs_is_that_of_training(
    way: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report before training has the graphs, runs and predictions of the report after it; the table agrees."""
    (folder / "train.py").write_text(BLOCKS)
    assert cli.main(["explain", "train.py", "--json", "--", way]) == 0
    before = json.loads(capsys.readouterr().out)
    assert fit("--budget", "0,1.0", "--json", "--no-rivals", "--", way) == 0
    (table,) = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["train.py", way])
    after = runpy.run_path("train.py")["trained"].to_dict()
    assert sorted(graph["runs"] for graph in before["graphs"]) == WAYS[way]
    assert before["graphs"] == after["graphs"]
    assert len(before["groups"]) == len(after["groups"]) > 0
    figures = before["summary"]
    for name in ("stock_peak_bytes", "peak_bytes", "offloaded_bytes", "written_bytes", "step_s"):
        assert figures[name] == after["summary"][name], name
    lowest, all_ = table["predictions"]
    assert lowest["peak_bytes"] == figures["peak_bytes"]
    assert lowest["written_bytes"] == figures["written_bytes"]
    assert lowest["step_s"] == pytest.approx(figures["step_s"], abs=1e-5)
    assert all_["peak_bytes"] == figures["stock_peak_bytes"]
    assert all_["written_bytes"] == 0


TOO_LARGE = """
import sys, torch, ssd_fx
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
        self.compiled = torch.compile(self.all, backend=ssd_fx.backend, options=OPTIONS)
    def all(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

def optimizer():
    if sys.argv[1] == "momentum":
        return torch.optim.SGD(model.parameters(), momentum=0.9)
    return torch.optim.Adam(model.parameters())

OPTIONS = {"engine": "memory", "machine": "default", "min_bytes": 0, "memory": "2MiB", "inner": "aot_eager"}
model = Model()
inputs, tables = torch.randn(4, 1024, 512), [torch.randn(256, 1024) for _ in range(3)]
made = optimizer() if sys.argv[1] not in ("none", "late") else None
loss = model.compiled(inputs[0])
if sys.argv[1] == "late":
    made = optimizer()
loss.backward()
if made is not None:
    state = [len(made.state), *(p.grad is None for p in model.parameters())]
    assert not any(state), "nobody has stepped it"
"""


@pytest.mark.parametrize(("optimizer", "state"), [("Adam", 8), ("momentum", 4), ("none", 8), ("late", 8)])
def test_what_is_too_much_is_what_training_warns_of(
    optimizer: str, state: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the script's own tensors, and with the state of an optimizer that is or is not made yet."""
    (folder / "train.py").write_text(TOO_LARGE)
    assert fit("--", optimizer) == 2
    predicted = re.search(r"none fits 2 MiB: the least is .*, ([\d.]+) MiB more; (.*)", capsys.readouterr().out)
    done = fresh.run(TOO_LARGE, optimizer)
    assert not done.returncode, done.stderr
    warned = re.search(r"memory=2 MiB: .* that is ([\d.]+) MiB too much", done.stderr)
    assert predicted
    assert warned
    assert float(predicted[1]) == pytest.approx(float(warned[1]), abs=0.02)
    assert float(predicted[1]) > 8 + 3 + 4 + 4 + state - 2  # MiB: batches, tables, layers, their gradients, the state


def test_a_report_says_what_it_does_not_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager code saves tensors too, where the loss is outside of the graphs."""
    said = "\nnot counted: what eager code saves beside them, such as a loss outside of the graphs\n"
    (folder / "train.py").write_text(BLOCKS)
    assert cli.main(["explain", "train.py", "--", "blocks"]) == 0
    assert said in capsys.readouterr().out
    (folder / "train.py").write_text(IN_PLACE)
    assert cli.main(["explain", "train.py"]) == 0
    assert said not in capsys.readouterr().out


def test_what_is_there_before_a_step_of_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters of compiled blocks and the tensors that are passed in from outside, not what blocks hand on."""
    (folder / "train.py").write_text(BLOCKS)
    assert fit("--budget", "1.0", "--json", "--", "blocks and head") == 0
    (table,) = json.loads(capsys.readouterr().out)
    block = 64 * 256 + 256 + 256 * 64 + 64
    head = 64 * 256 + 256
    assert table["input_bytes"] == 4 * (4 * block + head)
    assert table["batch"] == 512
    checkpoints = table["rivals"][0]
    assert checkpoints["budget"] == "checkpoint per layer"
    assert checkpoints["peak_bytes"] < table["predictions"][0]["peak_bytes"]
    assert "a checkpoint per layer is one around each of 4 Block" in table["note"]


def test_gradients_of_later_blocks_are_in_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of wide blocks and few rows these are nearly all of the peak, which is in the backward of the first block."""
    wide = BLOCKS.replace("sys.argv[1], 64", "sys.argv[1], 512").replace("randn(512, WIDTH)", "randn(64, WIDTH)")
    (folder / "train.py").write_text(wide)
    assert fit("--budget", "0", "--json", "--no-rivals", "--", "blocks") == 0
    (row,) = json.loads(capsys.readouterr().out)[0]["predictions"]
    monkeypatch.setattr(sys, "argv", ["train.py", "blocks"])
    figures = runpy.run_path("train.py")["trained"].to_dict()["summary"]
    gradients = 4 * (512 * 2048 + 2048 + 2048 * 512 + 512)  # of one block
    assert 3 * gradients < figures["measured_peak_bytes"] < 1.05 * figures["peak_bytes"]
    assert figures["peak_bytes"] == row["peak_bytes"] < 4.5 * gradients


def test_a_budget_in_bytes_is_one_for_all_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So many bytes are not written, however many graphs there are."""
    (folder / "train.py").write_text(BLOCKS)
    assert fit("--budget", "0,2MiB", "--json", "--no-rivals", "--", "blocks") == 0
    (table,) = json.loads(capsys.readouterr().out)
    lowest, some = table["predictions"]
    assert lowest["written_bytes"] - some["written_bytes"] == 2 * 2**20
    assert lowest["peak_bytes"] < some["peak_bytes"] <= lowest["peak_bytes"] + 2 * 2**20


PASSED = """
import torch, ssd_fx
from torch import nn
options = {"engine": "memory", "machine": "default", "min_bytes": 0}
compiled = torch.compile(lambda model, x: model(x).mean(), backend=ssd_fx.backend, options=options)
Block = type("Block", (nn.Sequential,), {})
model = nn.Sequential(*(Block(nn.Linear(64, 64), nn.Tanh()) for _ in range(2)))
loss = compiled(model, torch.randn(8, 64))
1 / 0
"""


def test_the_table_of_another_batch_has_the_same_notes_and_rivals(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layers are in a module that is passed to what is compiled."""
    (folder / "train.py").write_text(PASSED)
    tables = []
    for words in ([], ["--batch", "8"]):
        assert fit("--budget", "0", "--json", *words) == 0
        tables += json.loads(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert "a checkpoint per layer is one around each of 2 Block" in tables[1]["note"]
    assert "the step ends at train.py:9, before a backward: ZeroDivisionError" in tables[1]["note"]


def test_another_batch_of_blocks_is_not_guessed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(BLOCKS)
    assert fit("--batch", "8", "--", "blocks") == 1
    assert "batch=8: a step has 4 calls, which get their tensors from each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("loss.item()", "the step ends at train.py:16, before a backward: DataDependentOutputException: "),
        ("1 / 0", "the step ends at train.py:16, before a backward: ZeroDivisionError: division by zero"),
        ("sys.exit(3)", "the step ends at train.py:16, before a backward: status 3"),
        ("", "the script ended without a backward, and all its calls to train count as one step"),
    ],
)
def test_a_step_that_does_not_get_to_its_backward(
    end: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was called before counts, and the table says where it ended."""
    head = TRAIN[: TRAIN.index("try:")]
    (folder / "train.py").write_text(head + "loss = compiled(torch.zeros(rows, dtype=torch.long)).sum()\n" + end)
    assert fit("--budget", "0", "--json", "--", "1024", "512") == 0
    (table,) = json.loads(capsys.readouterr().out)
    assert said in table["note"]
    assert cli.main(["explain", "train.py", "--", "1024", "512"]) == 0
    assert said in capsys.readouterr().err


def test_blocks_under_a_checkpoint_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of them is offloaded."""
    around = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
    (folder / "train.py").write_text(BLOCKS.replace("else block(x)", f"else {around}"))
    assert fit("--budget", "0", "--", "blocks") == 1
    assert "nothing is offloaded under torch.utils.checkpoint" in capsys.readouterr().err


def test_a_machine_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rates, memory and drives come from the presets; flags go over them."""

    def planned(*words: str) -> Any:
        assert fit("--budget", "0", "--no-rivals", "--json", *words, "--", "64", "8") == 0
        return json.loads(capsys.readouterr().out)[0]

    here, there = planned(), planned("--machine", "h100")
    assert (there["rates"], there["memory"], there["drive_tbw"]) == ("given", 80 * 2**30, 2 * 14016)
    assert there["predictions"][0]["step_s"] < here["predictions"][0]["step_s"]
    faster = planned("--machine", "h100", "--drive", "samsung-9100-pro-4tb", "--drives", "4", "--memory", "1GiB")
    assert (faster["memory"], faster["drive_tbw"]) == (2**30, 4 * 2400)
    assert fit("--budget", "0", "--no-rivals", "--machine", "4090", "--", "64", "8") == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "planned for RTX-4090: 107 TFLOP/s in 16 bits, memory 857 GB/s;\n1 x samsung-990-pro-2tb: write 6"
    )


def test_the_limit_of_memory_is_the_script_s_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag goes over the option, and that over a preset. A share is one of the machine that is planned for."""

    def limit(option: str, *words: str) -> Any:
        (folder / "train.py").write_text(TRAIN.replace('"min_bytes": 0', f'"min_bytes": 0, {option}'))
        assert fit("--budget", "0", "--no-rivals", "--json", *words, "--", "64", "8") == 0
        return json.loads(capsys.readouterr().out)[0]

    here = CpuGauge().total_bytes()
    assert limit('"memory": "25%"')["memory"] == here // 4
    assert limit('"memory": "25%"', "--memory", "1GiB")["memory"] == 2**30
    assert 0 < limit('"memory": "auto"')["memory"] < here
    for option, gib in (('"memory": "20GiB"', 20), ('"memory": "25%"', 6), ('"memory": "auto"', 0.95 * 24), ("", 24)):
        assert limit(option, "--machine", "4090")["memory"] == int(gib * 2**30)
    assert limit('"memory": "25%"', "--machine", "4090", "--memory", "1GiB")["memory"] == 2**30
    uncounted = limit('"memory": "25%", "cpu_allocator": False')
    assert uncounted["memory"] is None
    assert "memory=0.25 is no limit here, for nothing counts the tensors of cpu" in uncounted["note"]


def test_ranks_and_directories_of_a_script_for_a_machine_that_is_not_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset's drives are those of one GPU. What the user says of the node is for all its ranks. And the directories
    need not be on this computer."""

    def planned(options: str, *words: str) -> Any:
        (folder / "train.py").write_text(TRAIN.replace('"engine": "memory"', options))
        assert fit("--budget", "0", "--no-rivals", "--json", "--machine", "4090", *words, "--", "64", "8") == 0
        return json.loads(capsys.readouterr().out)[0]

    monkeypatch.setenv("LOCAL_RANK", "1")
    alone, shared = planned('"ranks": 1'), planned('"ranks": 8, "dirs": ["/mnt/none"]')
    assert shared == alone
    assert shared["drive_tbw"] == 1200
    assert planned('"ranks": 8', "--drive-tbw", "600")["drive_tbw"] == 600 / 8
    assert planned('"ranks": 8, "drive_tbw": 400')["drive_tbw"] == 400 / 8
    assert planned('"ranks": 8, "host_budget": "1GiB"') == planned('"host_budget": "128MiB"')
    (folder / "train.py").write_text(TRAIN.replace("min_bytes", "main_bytes"))
    assert fit("--machine", "4090", "--", "64", "8") == 1
    assert capsys.readouterr().err.startswith("ssd-fx: ssd_fx has no option 'main_bytes'; did you mean 'min_bytes'?")


def test_rates_of_a_machine_that_is_not_here() -> None:
    """What passes the link limits its drives."""
    machine = MACHINES["4090"]
    many = replace(machine.drives, count=8)
    assert replace(machine, drives=many).rates()["write_bw"] == 31.5e9
    for name, each in MACHINES.items():
        assert min(each.rates().values()) > 0, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drives", "4"], "--drives=4.0 is of --machine; right would be both"),
        (["--drive", "samsung-990-pro-2tb"], "--drive=samsung-990-pro-2tb is of --machine"),
        (["--machine", "h100", "--drives", "0"], "drives=0 is not possible; right would be a number of drives per GPU"),
    ],
)
def test_drives_of_no_machine(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(*words, "--", "64", "8") == 2
    assert capsys.readouterr().err.startswith(f"ssd-fx: {said}")
