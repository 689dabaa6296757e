"""Ours beside its rivals at equal peaks: the arithmetic, the rivals' graphs, and that a case is planned once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import forecasts
import frontier
import pareto
import pytest
import slow_step
import torch
from forecasts import Figure
from frontier import GIB, At, Case
from rivals import KEEP, SIZES, Rival, Sizes, in_pairs, made, per_layer, rivals
from torch import nn

from ssd_fx.passes.plan import Limits
from ssd_fx.passes.planner.solve import BudgetError
from ssd_fx.rivals import BUDGETED, CHECKPOINT
from tests.bitwise import assert_same_bits

SMALL = Sizes("llama", 2, 64, 4, 2, 128, 256)
RATES = {"flops": 1e12, "memory_bw": 1e11, "write_bw": 1e9, "read_bw": 1e9, "latency_s": 0.0}


def figure(gib: float, ms: float, written: float = 0.0) -> Figure:
    return Figure(round(gib * GIB), ms / 1e3, round(written * GIB))


def case(checkpoint_ms: float = 95.0, curve: Sequence[tuple[float, float]] = ((1, 120), (2, 110), (4, 100))) -> Case:
    """A checkpoint takes 100 ms at 2 GiB, and everything kept as long at 4."""
    of = {KEEP: figure(4, 100), CHECKPOINT: figure(2, 100)}
    equal = {KEEP: At(4 * GIB, figure(4, 100)), CHECKPOINT: At(2 * GIB, figure(2, checkpoint_ms, 0.5))}
    return Case("about", "label", 5.0, of, equal, [At(gib * GIB, figure(gib, ms)) for gib, ms in curve])


def test_ours_is_never_worse() -> None:
    found = case(curve=[(1, 120), (4, 95)])
    assert found.ratio(CHECKPOINT) == pytest.approx(0.95)
    assert found.worst == (KEEP, 1.0)
    assert found.rise == pytest.approx(100 / 95), "the same limit once more, and slower"
    assert case(100.0, [(1, 120), (4, 100)]).holds
    assert "checkpoint per layer 1.000, above 0.95" in frontier.verdict(case(100.0, [(1, 120)]))
    assert "above" not in frontier.verdict(replace(case(100.0), gbps=2.0)), "no goal for slow drives"


def test_ours_is_worse() -> None:
    found = case(101.0, [(1, 120), (4, 100)])
    assert not found.holds
    assert frontier.verdict(found).startswith("FAILS: worst 1.010 (of checkpoint per layer)")
    assert "| **1.010** |" in frontier.table(found)


def test_more_memory_and_more_time() -> None:
    """Behind the lowest peaks, at which there may be no plan."""
    found = case(100.0, [(1, 99), (3, 103)])
    assert found.rise == pytest.approx(103 / 99)
    assert "NOT MONOTONE: 1.040" in frontier.verdict(found)
    assert replace(found, curve=[At(GIB, None), At(3 * GIB, figure(3, 100))]).rise == 1.0
    assert math.isinf(replace(found, curve=[At(3 * GIB, None)]).rise)


def test_no_plan_at_a_rivals_peak_is_a_lost_row() -> None:
    found = case()
    found = replace(found, equal=dict(found.equal) | {CHECKPOINT: At(2 * GIB, None)})
    assert found.worst == (CHECKPOINT, math.inf)
    assert "| no plan | **no plan** | no plan |" in frontier.table(found)
    assert not found.holds


def test_a_peak_above_its_limit() -> None:
    found = replace(case(100.0), curve=[At(GIB, figure(1.5, 130))])
    assert found.beyond == GIB // 2
    assert not found.holds
    assert replace(found, curve=[At(GIB, figure(1.00001, 130))]).beyond == 0


def test_limits_are_in_equal_steps() -> None:
    of = {KEEP: Figure(400, 1.0, 0, 200), CHECKPOINT: Figure(240, 1.0, 0)}
    assert frontier.limits(of, 4) == pytest.approx([220, 280, 340, 400])
    assert frontier.limits(of | {CHECKPOINT: Figure(100, 1.0, 0)}, 3) == pytest.approx([100, 250, 400])


def test_a_picture_has_a_panel_for_each_case() -> None:
    slow = replace(
        case(), rivals=dict(case().rivals) | {f"{BUDGETED} 0": figure(3, 110), f"{BUDGETED} 1": figure(4, 300)}
    )
    root = ElementTree.fromstring(frontier.picture([case(), slow]))
    panels = root.findall("{http://www.w3.org/2000/svg}svg")
    assert [(each.get("x"), each.get("y")) for each in panels] == [("0", "0"), ("760", "0")]
    said = [each.text or "" for each in panels[1].iter("{http://www.w3.org/2000/svg}title")]
    assert f"{BUDGETED} 0: 3.00 GiB, 110.0 ms, writes 0.00 GiB" in said
    assert not any(text.startswith(f"{BUDGETED} 1") for text in said), "three times the step that keeps all"


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5", "vit", "unet"])
def test_checkpoints_are_around_all_layers(name: str) -> None:
    """The loss and its gradients are those without."""
    small = {"llama": SMALL, "unet": Sizes("unet", 2, 32, 0, 1, 8), "vit": Sizes("vit", 2, 64, 4, 2, 16)}
    sizes = small.get(name) or Sizes(name, 4, 64, 4, 2, 16, 256)
    found = []
    for around in (lambda model: nullcontext(), per_layer, in_pairs):
        torch.manual_seed(0)
        model, inputs = made(sizes)
        model = model.to_empty(device="cpu").float()
        for tensor in (*model.parameters(), *model.buffers()):
            nn.init.normal_(tensor, std=0.1)
        real = [torch.randn(x.shape) if x.is_floating_point() else torch.randint(16, x.shape) for x in inputs]
        with around(model):
            loss = model(*real)
            loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_a_checkpoint_computes_again() -> None:
    """By the planner's own figures: less memory and more time than what keeps all."""
    wanted = {each.name: each for each in rivals([0.1])}
    keep, checkpoint, budget = (
        forecasts.of_rival(made(SMALL), wanted[name], RATES) for name in (KEEP, CHECKPOINT, f"{BUDGETED} 0.1")
    )
    assert checkpoint.peak_bytes < keep.peak_bytes
    assert min(checkpoint.step_s, budget.step_s) > keep.step_s
    assert keep.floor_bytes <= keep.peak_bytes
    assert (keep.written_bytes, checkpoint.written_bytes) == (0, 0)


def test_a_limit_below_the_floor_has_no_plan() -> None:
    low, high = forecasts.ours(made(SMALL), [forecasts.limit(1.0), forecasts.limit(1e12)], RATES)
    assert low is None
    assert high is not None
    assert high.written_bytes == 0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is planned, without planning: of ours time goes up where the peak goes down."""
    asked = []

    def of_rival(call: Any, rival: Rival, machine: Any) -> Figure:
        asked.append(rival.name)
        return Figure(4000, 1.0, 0, 1000) if rival.name == KEEP else Figure(2000, 2.0, 0)

    def ours(call: Any, budgets: Sequence[Any], machine: Any, *, recompute: bool = True) -> list[Figure | None]:
        asked.append(f"ours, {len(budgets)}" if recompute else "offload only")
        return [Figure(2000, 2.0, 500)] * len(budgets) if not recompute else [Figure(1000, 1.0, 0)] * len(budgets)

    monkeypatch.setattr(pareto, "of_rival", of_rival)
    monkeypatch.setattr(pareto, "ours", ours)
    return asked


def test_nodes_of_ours_may_lower_a_peak_under_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted once a plan is made. Here they lower each peak by 30 B, and no limit under 1000 B is planned."""

    def decide(joint: object, own: object, options: object, budgets: Sequence[Limits]) -> list[tuple[None, Limits]]:
        tightest = min(budget.memory for budget in budgets)
        if tightest < 1000:
            raise BudgetError(tightest, 1000)
        return [(None, budget) for budget in budgets]

    monkeypatch.setattr(forecasts, "cut", lambda joint, options: None)
    monkeypatch.setattr(forecasts, "decide_for_all", decide)
    monkeypatch.setattr(Figure, "of", lambda plan: Figure(round(plan.memory) - 30, 1.0, 0))
    budgets = [forecasts.limit(nbytes) for nbytes in (980, 960, 2000)]
    joint: Any = None
    found = forecasts.planned_at(budgets, joint, joint)
    assert [each and each.peak_bytes for each in found] == [970, None, 1970]


def test_a_second_run_goes_on(counted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rivals are those of the machine, whatever the drive; all limits of a drive are asked at once."""
    flags = ["--quick", "--models", "gpt", "--json-dir", str(tmp_path), "--points", "3"]
    assert pareto.main([*flags, "--gbps", "2"]) == 0
    first = [each.name for each in rivals((0.0, 0.5))]
    assert counted == [*first, "offload only", "ours, 4"]
    counted.clear()
    assert pareto.main([*flags, "--gbps", "2", "5"]) == 0
    assert counted == ["offload only", "ours, 4"]
    assert "2 of 2 cases hold" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*") if path.suffix != ".json"} == {"gpt.svg", "pareto.md"}
    counted.clear()
    assert pareto.main([*flags, "--gbps", "2", "5", "--ours-again"]) == 0
    assert counted == ["offload only", "ours, 4"] * 2


@pytest.mark.usefixtures("counted")
def test_the_status_says_that_a_rival_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, recompute: bool = True) -> list[Figure | None]:
        return [Figure(1000, 9.0, 0)] * (7 if recompute else 4)

    monkeypatch.setattr(pareto, "ours", lambda call, budgets, *_, **more: slow(**more)[:1] * len(budgets))
    assert pareto.main(["--quick", "--models", "gpt", "--json-dir", str(tmp_path)]) == 1


def test_a_case_survives_its_file() -> None:
    assert Case.read(json.loads(json.dumps(asdict(case())))) == case()


def test_every_model_has_its_rates_and_sizes() -> None:
    planned = [pareto.Planned(sizes, "80", 5.0) for sizes in SIZES.values()]
    assert len({each.stem for each in planned}) == len(SIZES)
    assert planned[0].rates["write_bw"] == 5e9


@pytest.mark.parametrize(("peak", "share"), [(100, 0.0), (150, 0.25), (300, 1.0), (50, 0.0), (900, 1.0)])
def test_the_share_whose_limit_is_a_peak(peak: float, share: float) -> None:
    assert slow_step.share_at(peak, 100, 300) == share


def test_pytorch_gets_the_fastest_share_within_the_checkpoints_peak() -> None:
    found = {KEEP: figure(4, 100), CHECKPOINT: figure(2, 120)}
    found |= {
        f"{BUDGETED} 0.1": figure(1.9, 130),
        f"{BUDGETED} 0.2": figure(2.001, 125),
        f"{BUDGETED} 0.9": figure(3, 99),
    }
    assert slow_step.budget_of(found) == 0.2
    above = {f"{BUDGETED} 0.8": figure(2, 101), f"{BUDGETED} 0.9": figure(3, 99)}
    assert slow_step.budget_of({CHECKPOINT: figure(1, 120)} | above) == 0.8


def test_measured_cases_have_files_of_their_own(tmp_path: Path) -> None:
    flags = slow_step.parsed(["--dir", str(tmp_path)])
    assert len({each.stem for each in slow_step.cases(flags)}) == 4
    assert flags.rounds == 15
