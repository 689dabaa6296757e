"""The harness for PyTorch's own suites, on a suite of its own: it sees faults, crashes, and what nobody explained."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.peers import run
from tests.peers.results import Comparison, OpRecord, Run, compare, peer_section

SUITE = """
import os, unittest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop

def gradient(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x * 1).sum(), x)[0]

def chain(x):
    return x.sin().cos().exp()

X = torch.linspace(-1, 1, 100)

class Toys(unittest.TestCase):
    def test_min_cut(self):
        found = gradient(aot_function(chain, nop, partition_fn=min_cut_rematerialization_partition), X)
        torch.testing.assert_close(found, gradient(chain, X))

    def test_default(self):
        torch.testing.assert_close(gradient(aot_function(chain, nop), X), gradient(chain, X))

    def test_registered_backend(self):
        torch.testing.assert_close(gradient(torch.compile(chain, backend="aot_eager"), X), gradient(chain, X))

    def test_form(self):
        graphs = []
        gradient(aot_function(chain, lambda gm, _: graphs.append(gm.code) or gm), X)
        self.assertFalse(any("ssd_fx" in code for code in graphs))

    def test_inference(self):
        self.assertEqual(aot_function(chain, nop)(X).shape, X.shape)

    @unittest.skip("as it is")
    def test_skipped(self):
        pass

    def test_ends_the_process(self):
        os._exit(7)
"""
TRAIN = ("test_min_cut", "test_default", "test_registered_backend")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    file = tmp_path / "checkout/test/functorch/test_aotdispatch.py"
    file.parent.mkdir(parents=True)
    file.write_text(SUITE)
    return tmp_path / "checkout"


@pytest.mark.slow
def test_run(checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process each for stock, ours and the planted fault, and one more behind each crash."""
    out, results = tmp_path / "out", tmp_path / "results.jsonl"
    common = ["--tests", str(checkout), "--out", str(out), "--results", str(results)]
    assert run.main(common) == 1  # test_form differs, and nobody explained it
    (row,) = map(json.loads, results.read_text().splitlines())
    assert row["stock"] == {"passed": 5, "failed": 0, "skipped": 1, "xfailed": 0, "crashed": 1}
    assert row["ours"] == {"passed": 4, "failed": 1, "skipped": 1, "xfailed": 0, "crashed": 1}
    (difference,) = row["differences"]
    assert difference == {"test": "Toys::test_form", "stock": "passed", "ours": "failed", "reason": ""}
    assert row["calls"] == len(TRAIN) + 1
    assert "Toys::test_form: passed -> failed: NOT EXPLAINED" in capfd.readouterr().out

    assert run.main([*common, "--partitioner", "flipped", "-k", " or ".join(TRAIN)]) == 0
    flipped = Run.read(out / "test_aotdispatch.flipped.jsonl")
    assert flipped.outcomes == {f"Toys::{name}": "failed" for name in TRAIN}
    assert flipped.groups == row["groups"] - 2 == 4  # all but those of test_form


def test_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--tests", str(tmp_path)]) == 2
    assert "git clone --depth 1 --branch v2." in capsys.readouterr().err


def compared(ours: dict[str, str], reasons: dict[str, str], groups: int = 1) -> Comparison:
    return compare("toys", Run({"a": "passed", "b": "skipped"}, 0, 0), Run(ours, 1, groups), reasons)


def test_what_is_right() -> None:
    same = {"a": "passed", "b": "skipped"}
    assert compared(same, {}).is_right
    assert not compared(same, {}, groups=0).is_right  # nothing was put to the test
    assert not compared(same | {"a": "failed"}, {}).is_right
    assert compared(same | {"a": "failed"}, {"a": "form"}).is_right
    assert not compared(same, {"a": "form"}).is_right  # it would hide the next fault
    assert not compared({"a": "passed"}, {}).is_right
    assert not compared(same | {"c": "passed"}, {}).is_right


def test_section() -> None:
    suite = asdict(compared({"a": "failed", "b": "skipped"}, {"a": "reads the graph"}, groups=3))
    ops = [asdict(OpRecord(*values)) for values in (("sin", "", "", 2, True), ("eig", "refused", "", 0, False))]
    text = peer_section([suite, *ops])
    assert "| toys | 1, 0, 1 | 0, 1, 1 | 1 graphs | 3 groups |" in text
    assert "* reads the graph: toys `a`" in text
    assert "for 2 cases" in text
    assert "Stock trains 1 of them" in text
    assert "Something was offloaded in 1; a sign flipped at every load shows in 1." in text
