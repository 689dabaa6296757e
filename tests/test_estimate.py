"""`ssd_fx.estimate`: what a step would need under several budgets, with nothing compiled and nothing run."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ssd_fx
from examples.train_gpt import GPT, Shape
from ssd_fx.calibration import calibrate
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.report.budgets import Estimate, Prediction
from ssd_fx.sizes import format_bytes
from tests import fresh
from tests.models import SMALL, batch
from tests.passes import toys
from tests.passes.recomputing import SLOW

TOY = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0, "recompute": False}
log = logging.getLogger(__name__)
LIMIT = 200 << 20
HUGE = Shape(layers=4, width=8192, heads=64, seq=2048, dropout=0.1)


def estimated(model: Any, inputs: object, budgets: list[Any], **changes: Any) -> Estimate:
    return ssd_fx.estimate(model, inputs, budgets=budgets, options=TOY | changes, rivals=False)


def one_layer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return GPT(replace(SMALL, layers=1)), batch()


def perceptron() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU()))), (torch.randn(1024, 64),)


@pytest.mark.parametrize(
    ("inner", "made", "budgets"),
    [("aot_eager", one_layer, [0.5, 0, "auto", 1.0, 0]), ("inductor", perceptron, [0.5, 0])],
    ids=["aot_eager", "inductor"],
)
def test_it_is_the_plan_that_compiling_makes_for_each_budget(
    inner: str, made: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]], budgets: list[Any]
) -> None:
    """One traced graph serves all budgets, and to look at one of them changes no other."""
    options = TOY | {"inner": inner, "recompute": True, "machine": SLOW, "budget": 0.5}
    model, inputs = made()
    found, again = ssd_fx.estimate(model, inputs, budgets=budgets, options=options), list[bool]()
    explained = {b: ssd_fx.explain(model, options=options | {"budget": b})(*inputs).dumps for b in {*budgets}}
    for budget, row in zip(budgets, found.predictions, strict=True):
        (graph,) = explained[budget]
        again.append(bool(graph.plan["recomputed"]))
        if budget == options["budget"]:
            assert (graph.graph == found.graph) is not again[-1], "another partition has another name"
        plan = graph.plan["predicted"]
        assert (row.step_s, row.compute_s) == (plan["step_s"], plan["compute_s"])
        assert row.stall_s == plan["write_stall_s"] + plan["read_stall_s"]
        assert (row.peak_bytes, row.written_bytes) == (plan["peak_bytes"], plan["written_bytes"])
        assert row.floor_bytes == plan["floor_bytes"], "what is computed again is not of the floor"
    assert any(again)
    assert len({row.step_s for row in found.predictions}) > 1, "the budgets differ"


def test_floor_and_limit_of_budget_0_stand_beside_each_other() -> None:
    found = estimated(GPT(SMALL), batch(), [0, 0.5], machine=SLOW)
    lowest, half = found.predictions
    assert lowest.floor_bytes <= lowest.limit_bytes < half.limit_bytes
    assert f"\nbudget 0: floor {format_bytes(lowest.floor_bytes)}, limit {format_bytes(lowest.limit_bytes)}" in str(
        found
    )
    assert "budget 0:" not in str(estimated(GPT(SMALL), batch(), [0.5]))


@pytest.mark.parametrize("codec", ["", "bitpack", "int8"])
def test_planned_bytes_are_those_that_compression_writes(codec: str) -> None:
    """Of a mask and of floats without zeros: nothing of theirs depends on values."""
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.5)), torch.randn(128, 256)
    options = TOY | {"min_bytes": "16KiB", "compression": codec, "adapt": False}
    planned = ssd_fx.estimate(model, x, budgets=[0], options=options).predictions[0].written_bytes
    ssd_fx.reset_stats()
    torch.compile(model, backend=ssd_fx.backend, options=options | {"budget": 0})(x).sum().backward()
    ssd_fx.close()
    assert 0 < planned == ssd_fx.stats().written_bytes


def test_a_budget_in_bytes_is_what_stays_beside_the_plan() -> None:
    """The runtime keeps what was stored last, so as many bytes are not written."""
    none, some, more, all_ = estimated(GPT(SMALL), batch(), [0, "1MiB", "1GiB", 1.0]).predictions
    assert some.written_bytes == none.written_bytes - 2**20
    assert none.peak_bytes < some.peak_bytes <= none.peak_bytes + 2**20
    assert (more.written_bytes, more.peak_bytes) == (0, all_.peak_bytes)


def test_what_stays_is_not_subtracted_from_compressed_bytes() -> None:
    """A budget in bytes counts tensors as they are in memory. So compressed bytes fall by the same share as others."""
    shares = []
    for codec in ("", "fp8"):
        little, much = estimated(*perceptron(), ["1KiB", "512KiB"], compression=codec).predictions
        shares.append(much.written_bytes / little.written_bytes)
    assert 0.5 < shares[0] < 0.9
    assert shares[1] == pytest.approx(shares[0], abs=0.01)


def test_a_model_without_data_is_estimated_like_one_with() -> None:
    real = estimated(GPT(SMALL), batch(), [0, 0.5])
    with FakeTensorMode():
        fake = GPT(SMALL)
    with torch.device("meta"):
        meta = GPT(SMALL)
    assert estimated(fake, batch(), [0, 0.5]) == real
    assert estimated(meta, batch(), [0, 0.5]) == real
    assert estimated(meta, tuple(x.to("meta") for x in batch()), [0, 0.5]) == real
    assert all(p.is_meta for p in meta.parameters())


def test_no_memory_is_taken() -> None:
    """13 GB of parameters and 100 GB of activations; the process grows by what the graphs take.

    It is a fresh process, whose peak is not that of an earlier test.
    """
    done = fresh.run("from tests import test_estimate; test_estimate.print_growth()")
    assert done.returncode == 0, done.stderr
    by_estimate, by_control = map(int, done.stdout.split())
    assert by_estimate < LIMIT
    assert by_control > LIMIT


def print_growth() -> None:
    """By how many bytes the peak of this process grows in an estimate, and then by twice `LIMIT`."""

    def peak_bytes() -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

    with torch.device("meta"):
        model = GPT(HUGE)
    estimated(GPT(SMALL), batch(), [0])  # what compiling anything takes
    peaks = [peak_bytes()]
    found = estimated(model, batch(HUGE, size=32), [0, 1.0])
    assert found.input_bytes > 12e9
    assert found.saved_bytes > 90e9
    peaks.append(peak_bytes())
    held = torch.ones(2 * LIMIT, dtype=torch.uint8)
    peaks.append(peak_bytes())
    del held
    print(peaks[1] - peaks[0], peaks[2] - peaks[1])


def test_nothing_runs() -> None:
    model = GPT(SMALL)
    model.register_forward_hook(lambda *_: pytest.fail("it ran") if not torch.compiler.is_compiling() else None)
    before, state = {name: p.clone() for name, p in model.named_parameters()}, torch.get_rng_state()
    estimated(model, batch(), [0], inner="inductor")
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert ssd_fx.stats().stores == 0


def test_another_batch_size() -> None:
    four, eight = batch(), batch(size=8)
    asked = ssd_fx.estimate(GPT(SMALL), four, batch=8, budgets=[0], options=TOY, rivals=False)
    assert asked == estimated(GPT(SMALL), eight, [0])
    assert (asked.batch, estimated(GPT(SMALL), four, [0]).batch) == (8, 4)


def test_keyword_arguments_and_what_is_compiled_already() -> None:
    inputs, targets = batch()
    compiled = torch.compile(GPT(SMALL), backend=ssd_fx.backend, options=TOY)
    found = estimated(compiled, {"inputs": inputs, "targets": targets}, [0])
    assert found == estimated(GPT(SMALL), (inputs, targets), [0])


@pytest.mark.parametrize(
    ("kind", "settings", "times"),
    [(torch.optim.AdamW, {}, 2), (torch.optim.SGD, {"momentum": 0.9}, 1), (torch.optim.SGD, {}, 0)],
    ids=["AdamW", "SGD with momentum", "SGD"],
)
def test_the_state_of_the_optimizer_counts(kind: Any, settings: dict[str, float], times: int) -> None:
    """Before its first step too, and without a step of the one that is given."""
    x = torch.randn(4, 1024)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    parameters = sum(p.nbytes for p in model.parameters())
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    found = ssd_fx.estimate(model, x, budgets=[0], options=TOY, optimizers=[optimizer])
    assert found.state_bytes == pytest.approx(times * parameters, abs=64)
    assert not optimizer.state
    row = found.predictions[0]
    assert row.memory_bytes == row.peak_bytes + found.state_bytes + parameters + x.nbytes


def test_an_optimizer_that_needs_data_counts_as_adam_aloud() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.warns(RuntimeWarning, match=r"the state of LBFGS is taken to .* as .* Adam, for .* data \(TypeError"):
        found = ssd_fx.estimate(model, torch.randn(2, 8), budgets=[0], options=TOY, optimizers=optimizer)
    assert found.state_bytes == 2 * 4 * (64 + 8)


def table(memory: int | None) -> Estimate:
    """12 B beside the step; keeping everything is a millionth of a second faster, and writes nothing."""
    rows = (
        Prediction(0, 100, 112, 2.0, 1.0, 0.9, 50),
        Prediction(0.5, 200, 212, 1.000001, 1.0, 0.0, 25),
        Prediction(1.0, 300, 312, 1.0, 1.0, 0.0, 0),
    )
    return Estimate("ab12", 4, 300, 8, 4, rows, memory=memory, drive_tbw=50 * 86400 / 1e12 if memory else 0.0)


def test_the_table() -> None:
    expected = """\
graph ab12: batch 4, 300 B saved; parameters, buffers and inputs 8 B, optimizer state 4 B
times by typical rates
budget   peak  all tensors  step   waits  written  drive life
0       100 B        112 B   2 s  900 ms     50 B      2 days  fits
0.5     200 B        212 B   1 s    0 ms     25 B      2 days  fastest that fits
1.0     300 B        312 B   1 s    0 ms      0 B      unused  too large
take budget 0.5: it writes 25 B a step"""
    assert str(table(212)) == expected


@pytest.mark.parametrize(
    ("machine", "unmeasured", "source"),
    [
        ("auto", [], "measured"),
        ("auto", ["disk"], "typical disk"),
        ("auto", ["compute", "disk"], "typical compute and disk"),
        ("default", [], "typical"),
        ({"write_bw": 1e9}, [], "given"),
    ],
)
def test_it_says_whose_rates_its_times_are(
    machine: Any, unmeasured: list[str], source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "calibrated", lambda config, device: Machine.default(device, 2))
    monkeypatch.setattr(calibrate, "unmeasured", lambda config, device: unmeasured)
    found = ssd_fx.estimate(nn.Linear(8, 8), torch.randn(2, 8), budgets=[0], options=TOY | {"machine": machine})
    assert f"\ntimes by {source} rates\n" in str(found)


def test_the_fastest_is_marked_where_memory_is_asked_for() -> None:
    assert [found.fastest and found.fastest.budget for found in map(table, (111, 112, 212, 312))] == [None, 0, 0.5, 1.0]
    assert str(table(111)).endswith(
        "\nnone fits 111 B: the least is 112 B, 1 B more; parameters, buffers, inputs and the optimizer's state are "
        "12 B of it\na smaller batch, a loss in chunks, sharding or an optimizer with less state would help"
    )
    assert "fits" not in str(table(None))
    assert "drive life" not in str(table(None))


def test_the_row_that_is_marked_is_the_one_to_take() -> None:
    """0.5 writes least within 1% of the fastest, and 0, which is better in all but time, is within 1% of 0.5."""
    rows = (
        Prediction(0, 100, 112, 1.018, 1.0, 0.0, 20),
        Prediction(0.5, 200, 212, 1.009, 1.0, 0.0, 25),
        Prediction(1.0, 300, 312, 1.0, 1.0, 0.0, 30),
    )
    found = str(Estimate("ab12", 4, 300, 8, 4, rows, memory=400)).splitlines()
    marks = [line.rpartition("  ")[2] for line in found[3:6]]
    assert marks == ["fastest that fits", "fits, worse than 0", "fits, worse than 0.5"]
    assert found[-1].startswith("take budget 0:")


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x @ w).relu() @ w
    torch._dynamo.graph_break()
    return (y @ w).sigmoid()


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> Any:
    return checkpoint(ssd_fx.estimate, toys.relu_chain, (x, w), options=TOY, use_reentrant=False)


def test_the_drives_wear_by_what_all_ranks_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks write to the drives of the node, so each has half of their life. The option counts as the argument."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    one = ssd_fx.estimate(model, x, budgets=[0], options=TOY, drive_tbw=600)
    monkeypatch.setenv("LOCAL_RANK", "1")
    two = ssd_fx.estimate(model, x, budgets=[0], options=TOY | {"ranks": 2}, drive_tbw=600)
    by_option = ssd_fx.estimate(model, x, budgets=[0], options=TOY | {"ranks": 2, "drive_tbw": 600})
    assert [one.drive_tbw, two.drive_tbw, by_option.drive_tbw] == [600, 300, 300]


def test_what_a_model_logs_breaks_no_graph() -> None:
    """Hugging Face models warn of their loss; Dynamo breaks there, unless it is told to leave loggers out."""

    def told(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        log.warning("a warning")
        print("and a line")
        return toys.relu_chain(x, w)

    assert estimated(told, toys.inputs(), [0]) == estimated(toys.relu_chain, toys.inputs(), [0])


@torch.compiler.nested_compile_region
def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin().cos()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda x, w: (x @ w).detach(), "the model has no backward; right would be one whose parameters or inputs"),
        (broken, r"broken does not compile as one graph, .*graph_break.*test_estimate.py:\d+\); right would be"),
        (lambda x, w: region(region(x, w), w), "the model has regions that compile to graphs of their own"),
        (lambda x, w: 1, "finds no tensors to compile in .*lambda.*; right would be a model that trains"),
    ],
    ids=["no backward", "graph break", "nested region", "no graph"],
)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_model_that_cannot_be_estimated(model: Any, said: str, inner: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        estimated(model, toys.inputs(), [0], inner=inner)
    assert "\n" not in str(raised.value)


def test_in_a_checkpoint_all_budgets_are_alike() -> None:
    with (
        pytest.warns(RuntimeWarning, match="ssd_fx keeps all"),
        pytest.raises(ValueError, match=r"nothing is offloaded under torch\.utils\.checkpoint"),
    ):
        checkpointed(*toys.inputs())


def test_a_limit_of_memory_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the lowest peak and that of everything kept it is filled; what stays is not written."""
    monkeypatch.delenv("SSD_FX_BUDGET")
    model, x = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh()))), torch.randn(4096, 64)
    found = ssd_fx.estimate(model, x, budgets=[0, 1.0], options=TOY, rivals=False)
    least, most = (row.memory_bytes for row in found.predictions)
    limit = (least + most) // 2
    for options, memory in ((TOY, limit), (TOY | {"memory": limit}, None)):
        within = ssd_fx.estimate(model, x, budgets=[0, 1.0], options=options, memory=memory, rivals=False)
        row = within.predictions[-1]
        assert (row.budget, within.memory, within.fits(row)) == ("memory", limit, True)
        assert row.memory_bytes == limit
        assert row.written_bytes == within.predictions[0].written_bytes - (limit - least)
        assert row.step_s < within.predictions[0].step_s
        assert within.verdict.startswith(f"take memory={format_bytes(limit)}: ")
    half = within.predictions[-1].written_bytes / within.predictions[0].written_bytes
    lossy = ssd_fx.estimate(model, x, budgets=[0], options=TOY | {"compression": "fp8"}, memory=limit, rivals=False)
    assert lossy.predictions[-1].written_bytes / lossy.predictions[0].written_bytes == pytest.approx(half, abs=0.01)
    small = ssd_fx.estimate(model, x, budgets=[0, 1.0], options=TOY, memory=least - 1024, rivals=False)
    assert len(small.predictions) == 2
    assert re.search(r", 1024 B more; .* the largest tensor at its peak is \w+ \(.*1 MiB\)\n", small.verdict)


def test_a_limit_above_all_writes_nothing() -> None:
    """The lowest peak is of one moment, so what everything takes above it is less than all that is offloaded."""
    model, x = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.Sigmoid()))), torch.randn(256, 64)
    options = {"machine": {"flops": 1e9, "memory_bw": 1e9, "write_bw": 3e6, "read_bw": 3e6}}
    found = ssd_fx.estimate(model, x, budgets=[1.0], options=TOY | options, memory="8GiB", rivals=False)
    all_, row = found.predictions
    assert (row.written_bytes, row.stall_s, row.peak_bytes) == (0, 0, all_.peak_bytes)


def test_one_budget_and_one_optimizer_need_no_list() -> None:
    """A text is a sequence of letters, and "0.5" was refused for its dot."""
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    several = ssd_fx.estimate(model, x, budgets=["0.5"], options=TOY, memory=1 << 30, optimizers=[optimizer])
    assert ssd_fx.estimate(model, x, budgets="0.5", options=TOY, memory="1GiB", optimizers=optimizer) == several
    assert several.state_bytes > 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budgets": ["512"]}, "budget='512' has no unit: of what. Right would be '512MiB'"),
        ({"budgets": ["lots"]}, "option budget='lots' is not a budget; right would be"),
        ({"budgets": []}, r"budgets is empty; right would be e\.g\. \[0, 0\.5\]"),
        ({"memory": 0}, r"memory=0 is nothing; right would be e\.g\. '8GiB'"),
        ({"memory": "8"}, r"memory='8' has no unit; right would be e\.g\. '8GiB'"),
        ({"memory": 8}, r"memory=8 has no unit; right would be e\.g\. '8GiB'"),
        ({"memory": "."}, r"memory='\.' is not a size; right would be a number of bytes or"),
        ({"drive_tbw": "600TB"}, r"drive_tbw='600TB' is no number of TB; right would be e\.g\. 600"),
        ({"batch": 0}, "batch=0 is no batch size; right would be a number above 0"),
        ({"inputs": 3}, "inputs=3 are no inputs; right would be a tensor, a tuple"),
        ({"inputs": (), "batch": 2}, "batch=2: the model gets no tensor with a batch"),
        ({"options": {"bugdet": 0}}, "no option 'bugdet'; did you mean 'budget'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_is_asked_wrongly(wrong: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"inputs": toys.inputs(), "options": TOY} | wrong
    with pytest.raises(ValueError, match=said):
        ssd_fx.estimate(toys.relu_chain, **asked)
