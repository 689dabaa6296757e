"""The examples for other people's trainers: what they compute with everything on disk, they compute with all kept.

They need `pip install -e '.[trainers]'` and are skipped without it.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import ssd_fx
from ssd_fx import cli
from tests.bitwise import Compile, by_name, kept, ours, prove_bitwise
from tests.compatibility import Result, record
from tests.planned_order import assert_in_planned_order

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "with_accelerate": ("accelerate",),
    "with_lightning": ("lightning",),
}
FORWARDS = {"hf_trainer": 2, "with_accelerate": 2, "with_lightning": 1}  # in a step
STEPS = 2


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    """What an Accelerator was told holds for the process, until it is forgotten."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


def trained(name: str, directory: Path, compile: Compile) -> list[torch.Tensor]:
    """Losses and parameters; the example names the directory, all else comes from the environment."""
    example = importlib.import_module(f"examples.trainers.{name}")
    with by_name(compile):
        losses, model = example.train(str(directory), STEPS)
    return [torch.tensor(losses), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NEEDS)
def test_no_bit_changes(name: str, inner: str, tmp_path: Path) -> None:
    for library in NEEDS[name]:
        pytest.importorskip(library, reason="needs pip install -e '.[trainers]'")
    # Few bytes may wait to be written, so that most are written and not handed back.
    options = {"min_bytes": 0, "inner": inner, "inflight": "64KiB"}
    prove_bitwise(partial(trained, name, tmp_path), [kept(options), ours(options)])
    stats = ssd_fx.stats()
    assert stats.steps == STEPS * FORWARDS[name]
    record(Result("trainers", name, inner, stats.saved_bytes, stats.written_bytes))
    assert stats.offloaded_bytes >= 0.9 * stats.saved_bytes
    assert stats.written_bytes >= 0.5 * stats.offloaded_bytes
    assert stats.loads == stats.stores
    assert_in_planned_order()


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_as_a_script(name: str, tmp_path: Path) -> None:
    for library in NEEDS[name]:
        pytest.importorskip(library, reason="needs pip install -e '.[trainers]'")
    script = ROOT / "examples" / "trainers" / f"{name}.py"
    command = [sys.executable, str(script), "--dir", str(tmp_path), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert f"{2 * FORWARDS[name]} steps, " in done.stdout  # transformers' first warning breaks the graph
    bytes_per_step = dict(re.findall(r"^(\w+) +([\d.]+) MiB", done.stdout, re.MULTILINE))
    assert float(bytes_per_step["written"]) > 0.5 * float(bytes_per_step["saved"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_what_a_script_needs_before_it_trains(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ssd-fx fit` and `explain` follow the trainer up to its first backward."""
    for library in NEEDS[name]:
        pytest.importorskip(library, reason="needs pip install -e '.[trainers]'")
    script, behind = str(ROOT / "examples" / "trainers" / f"{name}.py"), ["--", "--dir", str(tmp_path), "--steps", "2"]
    assert cli.main(["fit", script, "--budget", "0,1.0", "--json", *behind]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    lowest, all_ = table["predictions"]
    assert lowest["peak_bytes"] < all_["peak_bytes"]
    assert lowest["written_bytes"] > all_["written_bytes"] == 0
    assert "before a backward" not in table["note"]
    assert cli.main(["explain", script, "--budget", "0", "--json", *behind]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["summary"]["written_bytes"] == lowest["written_bytes"]


def test_why_the_name_alone_is_not_enough(tmp_path: Path) -> None:
    """When this fails their options take any backend, and docs/trainers.md and the examples can say so."""
    accelerate = pytest.importorskip("accelerate", reason="needs pip install -e '.[trainers]'")
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        accelerate.Accelerator(cpu=True, dynamo_backend="ssd_fx")
    transformers = pytest.importorskip("transformers", reason="needs pip install -e '.[trainers]'")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), torch_compile_backend="ssd_fx", use_cpu=True, report_to=[]
    )
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        transformers.Trainer(torch.nn.Linear(1, 1), arguments)
