"""`ssd_fx.report()` and `ssd_fx.explain`: what they say of models that train, and of what the caller holds."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ssd_fx
from ssd_fx.report.command import read
from ssd_fx.report.figures import drive_life, figures
from ssd_fx.report.page import data
from ssd_fx.report.report import Report, made
from ssd_fx.report.text import _memory, lines
from ssd_fx.report.unfreed import unfreed
from ssd_fx.runtime import plans
from ssd_fx.runtime.stats import Stats
from tests.report import made_up
from tests.report.made_up import MIB, group
from tests.report.trained import SIZE, TOY, Block, Stack, report, train

HIDDEN = 4 * SIZE * SIZE  # bytes of one hidden state


def train_blocks(layers: int, steps: int, *, keep: bool) -> list[Block]:
    """Blocks that are compiled one by one. keep: the caller keeps what comes into each until the backward is over."""
    torch._dynamo.reset()
    ssd_fx.reset_stats()
    blocks = [Block() for _ in range(layers)]
    for block in blocks:
        block.compile(backend=ssd_fx.backend, options=TOY)
    for _ in range(steps):
        held = []
        x = torch.randn(SIZE, SIZE)
        for block in blocks:
            x = block(x)
            held.append(x)
        if not keep:
            held.clear()
        loss = x.sum()
        del x
        loss.backward()
    return blocks


def test_the_five_lines_come_first_and_their_figures_are_those_of_the_run() -> None:
    model = train(steps=4)
    found, seen = ssd_fx.report(), ssd_fx.stats()
    told = lines(found)
    assert [name for name, _ in told] == ["memory", "cost", "drive", "plan", "next"]
    assert str(found).splitlines()[:5] == [f"{name:7} {said}" for name, said in told]
    counted = figures(found)
    assert counted.measured_stall_s == seen.stall_s / 4
    assert counted.offloaded_bytes == seen.offloaded_bytes // 4
    assert counted.stay_bytes == 3 * HIDDEN  # the outputs, which are saved too
    assert counted.stock_stay_bytes == 3 * HIDDEN + seen.saved_bytes // 4
    assert seen.steps == 4
    del model


def test_predicted_figures_add_up() -> None:
    for graph in report(budget=0.5).graphs:
        of = graph.predicted
        parts = of["compute_s"] + of["transfer_s"] + of["write_stall_s"] + of["read_stall_s"]
        assert parts == pytest.approx(of["step_s"], rel=1e-9)


def test_outputs_that_stay_are_named_with_their_lines(found: Report) -> None:
    said = str(found)
    where = "trained.py:" + str(_line("x = block(x).tanh()"))
    assert f"NOT FREED: {3 * HIDDEN} B of " in said
    assert re.search(rf"{3 * HIDDEN} B +{where} +held by the caller, as an output of the graph", said)
    assert f"do not return {where} from the compiled code" in said


def test_a_caller_that_keeps_every_hidden_state_is_named() -> None:
    blocks = train_blocks(3, 6, keep=True)
    found = ssd_fx.report()
    held = [each for each in unfreed(found) if each.who == "the caller, who has passed it in"]
    assert held
    assert {each.row.source for each in held} == {
        f"argument x of Block.forward trained.py:{_line('def forward(self, x: Tensor) -> Tensor:')}"
    }
    assert held[0].nbytes == pytest.approx(2 * HIDDEN, rel=0.35)  # the caller's x before the first block is dropped
    assert "NOT FREED" in str(found)
    del blocks


def test_a_caller_that_keeps_nothing_is_not_blamed() -> None:
    blocks = train_blocks(3, 6, keep=False)
    assert [each for each in unfreed(ssd_fx.report()) if not each.planned] == []
    del blocks


def test_a_drive_without_room_is_named(tmp_path: Path) -> None:
    options = {"engine": "posix", "dirs": [str(tmp_path)], "allow_tmpfs": True, "disk_limit": 4096}
    with pytest.warns(RuntimeWarning, match="keeps activations in memory"):
        found = report(steps=3, **options)
    failed = [each for each in unfreed(found) if each.who.startswith("us, for storing failed")]
    assert len(failed) == 4
    assert all(str(tmp_path) in each.who for each in failed)


def test_steps_are_the_users_where_blocks_are_compiled_one_by_one() -> None:
    blocks = train_blocks(3, 4, keep=False)
    assert ssd_fx.stats().steps == 4
    found = ssd_fx.report()
    assert len(found.order) == 3
    assert sum(graph.runs for graph in found.graphs) == 3
    del blocks


def test_layers_are_folded_on_one_screen() -> None:
    found = ssd_fx.explain(Stack(16), options=TOY)(torch.randn(SIZE, SIZE))
    assert len(found.rows()) == 33
    said = str(found)
    assert len(said.splitlines()) <= 24  # how many modules the step waits for depends on the number of threads
    assert "blocks.{0..15}" in said
    assert "nothing measured" in said


def test_explain_counts_nothing_and_has_the_code() -> None:
    ssd_fx.reset_stats()
    found = ssd_fx.explain(Stack(2), options=TOY)(torch.randn(SIZE, SIZE))
    assert ssd_fx.stats().steps == 0
    assert found.stats is None
    (dump,) = found.dumps
    assert "ssd_fx.begin_.default(" in dump.forward
    assert max(map(len, dump.forward.splitlines())) < 1000  # the packed plan is left out


def test_a_report_says_whose_rates_its_times_are() -> None:
    x = torch.randn(SIZE, SIZE)
    assert " by typical rates" in dict(lines(ssd_fx.explain(Block(), options=TOY)(x)))["cost"]
    found = ssd_fx.explain(Block(), options=TOY | {"machine": {"write_bw": 1e9}})(x)
    assert " by given rates" in dict(lines(found))["cost"]


def test_before_any_step_under_a_limit_of_memory_no_budget_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both options are an error."""
    monkeypatch.delenv("SSD_FX_BUDGET", raising=False)
    options = TOY | {"machine": {"write_bw": 1e6, "read_bw": 1e6}}
    said = [
        dict(lines(ssd_fx.explain(Block(), options=options | more)(torch.randn(SIZE, SIZE))))["next"]
        for more in ({"budget": 0}, {"memory": "1GiB"})
    ]
    assert said[0].startswith("budget=")
    assert said[1] == "nothing: from the second step on the runtime keeps what fits `memory`; `ssd-fx fit` predicts it"


def test_values(found: Report) -> None:
    rows = found.rows()
    assert len(rows) == 7
    assert all(set(row) == set(rows[0]) for row in rows)
    block = next(row for row in rows if row["module"] == "blocks.1" and row["decision"] == "offload")
    assert block["source"] == f"trained.py:{_line('return x + self.down')}"
    assert block["write_from_s"] <= block["write_to_s"] <= block["used_s"] <= block["last_used_s"]
    again = json.loads(json.dumps(found.to_dict()))
    assert again["groups"] == rows
    assert again["summary"]["measured_stall_s"] == figures(found).measured_stall_s


def test_the_step_is_over_time_what_the_forecast_says(found: Report) -> None:
    (graph,) = found.graphs
    assert found.planned.peak == graph.predicted["peak_bytes"]
    assert found.stock.peak == graph.predicted["kept_peak_bytes"]
    assert found.planned.end_s == pytest.approx(graph.predicted["step_s"], abs=1e-6)
    waits = sum(span.end - span.begin for span in found.planned.waits)
    assert waits == pytest.approx(graph.predicted["write_stall_s"] + graph.predicted["read_stall_s"], abs=1e-5)


def test_graphs_of_blocks_make_one_step() -> None:
    blocks = train_blocks(3, 3, keep=False)
    found = ssd_fx.report()
    each = [next(g for g in found.graphs if g.graph == name) for name in found.order]
    assert found.planned.end_s == pytest.approx(sum(g.predicted["step_s"] for g in each), abs=1e-5)
    assert found.stock.peak > max(g.predicted["kept_peak_bytes"] for g in each)
    used = [span.end for span in sorted(found.planned.of("wait"), key=lambda span: span.run)]
    assert used == sorted(used, reverse=True)  # the backwards come in the reverse order
    del blocks


def test_a_graph_that_keeps_everything_has_steps_too() -> None:
    """Nothing is loaded there, so no load tells where a step ends."""
    model = train(steps=6, budget=1.0)
    found = ssd_fx.report()
    assert (len(found.order), ssd_fx.stats().loads) == (1, 0)
    assert figures(found).stock_stay_bytes == 3 * HIDDEN + ssd_fx.stats().saved_bytes // 6
    del model


def test_what_a_checkpoint_computes_again_begins_no_step_and_counts_once() -> None:
    blocks = train_blocks(3, 1, keep=False)  # what is compiled within a checkpoint has no nodes of ours
    for _ in range(4):
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
    found = ssd_fx.report()
    assert found.step is not None
    assert len(found.step.of("begin")) == 6
    assert len(found.order) == 3


def test_steps_before_and_after_a_reset_are_not_one() -> None:
    model = train(steps=1)
    ssd_fx.reset_stats()
    for _ in range(2):
        model(torch.randn(SIZE, SIZE))[-1].sum().backward()
    assert len(ssd_fx.report().order) == 1
    del model


def test_equal_models_under_other_options_have_counts_and_plans_of_their_own(tmp_path: Path) -> None:
    """They would have one name, the counts of both under it, and the plan of the last that ran."""
    chosen = [TOY | {"budget": budget, "dump": str(tmp_path)} for budget in (0, 1.0)]
    models = [torch.compile(Block(), backend=ssd_fx.backend, options=options) for options in chosen]
    for _ in range(3):
        for model in models:
            model(torch.randn(SIZE, SIZE)).sum().backward()
    moved, kept = ssd_fx.stats().graphs.values()
    assert (moved.steps, moved.offloaded_bytes) == (3, moved.saved_bytes)
    assert (kept.steps, kept.offloaded_bytes) == (3, 0)
    assert {graph.budget for graph in ssd_fx.report().graphs} <= {0, 1.0}
    assert sorted(json.loads(path.read_text())["offloaded_bytes"] for path in tmp_path.glob("*.plan.json")) == [
        0,
        moved.offloaded_bytes // 3,
    ]


def test_graphs_of_other_batches_are_not_added_to_the_step(tmp_path: Path) -> None:
    model = train(steps=2)
    alone = ssd_fx.report()
    for _ in range(4):
        model(torch.randn(2 * SIZE, SIZE))[-1].sum().backward()
    assert len(ssd_fx.stats().graphs) == 2
    ssd_fx.export_trace(tmp_path / "trace.json")
    for found in (ssd_fx.report(), read(tmp_path / "trace.json")):
        assert len(found.order) == len(found.graphs) == 1
        assert found.order != alone.order
        assert figures(found).stock_stay_bytes < 2.5 * figures(alone).stock_stay_bytes
    del model


def test_host_memory_wears_no_drive() -> None:
    found = dict(lines(report(drive_tbw=600)))["drive"]
    assert found.startswith("0 B written a step (predicted ")
    assert "day" not in found


def test_what_moves_on_from_host_memory_wears_drives(found: Report) -> None:
    gb = 10**9
    seen = Stats(steps=4, written_bytes=9 * gb, drive_bytes=3 * gb, moved_bytes=gb, drive_tbw=600, step_s=1.0)
    found = dataclasses.replace(found, stats=seen)
    assert figures(found).measured_drive_bytes == 10**9
    assert drive_life(figures(found)) == pytest.approx(600e12 / 10**9 / 86400)


def test_a_measured_peak_leads_and_says_where_it_was_measured(found: Report) -> None:
    told = dataclasses.replace(figures(found), measured_peak_bytes=1000)
    assert _memory(found, told).startswith("measured peak at our nodes 1000 B; planned peak ")


def test_a_measured_peak_above_the_plan_says_what_it_may_have() -> None:
    plan = made_up.graph("a", [group(0, 90 * MIB), group(1, 10 * MIB, "keep", reason="scalar")])
    found = made([plan], ["a"])

    def said(mib: int) -> str:
        return _memory(found, dataclasses.replace(figures(found), measured_peak_bytes=mib * MIB)).split("; ")[0]

    assert said(11) == "measured peak at our nodes 11 MiB"
    may = "it may have up to 90 MiB being written (`inflight`) and 64 MiB read early (`prefetch`)"
    assert said(80) == f"measured peak at our nodes 80 MiB, 70 MiB above the plan: {may}"
    assert said(180) == f"measured peak at our nodes 180 MiB, 170 MiB above the plan: {may}, and more than that"


def test_before_any_step() -> None:
    ssd_fx.reset_stats()
    found = ssd_fx.report()
    assert found.missing.startswith("nothing ran")
    assert str(found) == f"next    {found.missing}"
    assert data(found)["lines"] == [("next", found.missing)]


def test_plans_go_with_the_graphs() -> None:
    model = train(layers=1, steps=1, prefetch=12345)  # options of its own, so that no other graph keeps the plans
    assert len(plans.packed()) >= 1
    (name,) = ssd_fx.stats().graphs
    del model
    torch._dynamo.reset()
    gc.collect()
    ssd_fx.close()  # handles what died
    assert name not in plans.packed()
    said = str(ssd_fx.report())
    assert "the compiled graphs are gone, and their plans with them; right would be ssd_fx.report() while" in said
    assert "1 steps, 1 graphs" in said


def test_messages_name_the_module_and_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ssd_fx")
    blocks = train_blocks(2, 4, keep=True)
    said = [each.getMessage() for each in caplog.records if "is no longer written" in each.getMessage()]
    assert said
    assert all("argument x of Block.forward trained.py:" in each for each in said)
    del blocks


def _line(text: str) -> int:
    source = (Path(__file__).parent / "trained.py").read_text().splitlines()
    return next(i for i, line in enumerate(source, 1) if text in line)
