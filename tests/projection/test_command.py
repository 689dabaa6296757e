"""`ssd-fx project`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_fx import cli

PLAN: dict[str, Any] = {
    "graph": "ab12",
    "saved_bytes": 1000,
    "offloaded_bytes": 900,
    "predicted": {"step_s": 2.0, "written_bytes": 900},
    "groups": [
        {"module": "blocks.0.mlp", "decision": "offload", "stored_nbytes": 300},
        {"module": "blocks.1.mlp", "decision": "offload ssd", "stored_nbytes": 500},
        {"module": "blocks.1.mlp", "decision": "keep", "stored_nbytes": 100},
        {"module": "norm", "decision": "offload", "stored_nbytes": 100},
    ],
}


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main(["project", *flags]) == 0
    return capsys.readouterr().out


def test_a_preset_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--model", "ssdtrain-12288").splitlines()
    rows = {line[:11].strip(): line[13:] for line in lines}
    assert rows["write rate"].startswith("12.8 GB/s within half the step (the paper's measure)")
    assert rows["drive life"].endswith("by rated TBW (4 x 600 TB)")
    rated = next(i for i, line in enumerate(lines) if line.startswith("drive life"))
    assert "with WAF 2.5" in lines[rated + 1]
    assert lines[rated + 2].strip() == "these are the reference paper's assumptions, which no vendor guarantees"
    assert rows["cost"].startswith("$360 of drives per GPU, 3.6% of what that costs; $720 for 2 GPUs")


def test_single_values_go_over_presets(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--drives", "3", "--tbw", "1000", "--price", "70", "--tp", "4", "--batch", "1", "--tflops", "99")
    found = json.loads(printed(capsys, "--model", "ssdtrain-8192", *flags, "--json"))["scenario"]
    assert found["drives"]["count"] == 3
    assert (found["drives"]["drive"]["tbw"], found["drives"]["drive"]["price_usd"]) == (1000, 70)
    assert (found["parallelism"]["tp"], found["batch"], found["tflops"]) == (4, 1, 99)


def test_a_model_by_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    shape = (
        "--layers",
        "2",
        "--width",
        "64",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--sequence",
        "32",
        "--vocabulary",
        "9",
    )
    found = json.loads(printed(capsys, *shape, "--gated", "--no-dropout", "--machine", "h100-u2", "--json"))
    assert found["outside_bytes"] == 32 * 2 * (2 * 64 + 9)
    assert found["layer_bytes"] == 32 * 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 256)
    assert found["scenario"]["tflops"] == pytest.approx(0.4 * 989.4)
    assert found["scenario"]["tflops_source"] == "40% of its peak, a guess"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tflops 99", "at 99 TFLOP/s (as given);"),
        ("--utilisation 0.5", "at 156 TFLOP/s (50% of its peak);"),
        ("--peak-tflops 1000", "at 400 TFLOP/s (40% of its peak, a guess);"),
        ("", "at 135 TFLOP/s (of the preset);"),
    ],
)
def test_the_text_says_where_the_rate_is_from(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in printed(capsys, "--model", "megatron-18b", *flags.split())


def test_a_node_with_fewer_drives_than_gpus_and_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--model", "llama-3-70b", "--drives", "0.5")
    assert "0.5 x samsung-pm9d3a-7.68tb-u2 per GPU" in out
    assert "6 per GPU within half the step, 9 within the forward, of these drives" in out
    large = printed(capsys, "--model", "llama-3-70b", "--tp", "1", "--pp", "1", "--zero", "0")
    assert "too much; right would be a larger --tp, --pp or --zero" in large


def test_the_text_says_what_limits_the_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    full = printed(capsys, "--model", "megatron-1t", "--drives", "2")
    assert "2 TB on the drives, which have room for no more)" in full
    assert "not even 1 fits on the drives" in printed(capsys, "--model", "megatron-1t", "--capacity-tb", "0.001")
    slow = printed(capsys, "--model", "megatron-18b", "--drives", "1")
    assert "the drives are too slow for more than 25.4% of the activations; the rest must stay" in slow
    assert ", 74.6% of the activations kept)" in slow


def test_the_link_of_the_gpu_may_be_too_slow_for_all_drives(capsys: pytest.CaptureFixture[str]) -> None:
    """Drives of 54 GB/s behind PCIe 5.0 are not the limit for 30 GB/s; behind a link of 10 GB/s it is."""
    many = ("--model", "llama-3-70b", "--drives", "8")
    assert "the writes hide within half the step" in printed(capsys, *many)
    behind = printed(capsys, *many, "--link-gbps", "10")
    assert "; the link has 10 GB/s each way" in behind
    assert "the link is too slow for more than 27.3% of the activations" in behind


def test_drives_that_read_too_slowly_are_the_limit_and_not_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    """They write faster than the link."""
    slow = printed(capsys, "--model", "llama-3-8b", "--write-gbps", "100", "--read-gbps", "0.5", "--drives", "1")
    assert "the drives are too slow for more than 1% of the activations" in slow


def test_nearly_all_is_not_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(PLAN | {"predicted": {"step_s": 2.0, "written_bytes": 10**10}}))
    out = printed(
        capsys, "--of", str(tmp_path / "a.json"), "--write-gbps", "9.988", "--read-gbps", "20", "--drives", "1"
    )
    assert "too slow for more than 99.8% of the activations; the rest must stay" in out
    assert "; 99.8% of the activations\n" in out


def test_what_a_checkpoint_around_every_layer_would_take_instead(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "--model", "llama-3-70b")
    assert "around every layer: 426 ms for forward and backward (+32%), peak 1.512 GiB, micro-batch at most 45" in out


def test_another_gpu_does_not_have_the_rate_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    def rate(*flags: str) -> float:
        return float(json.loads(printed(capsys, "--model", "megatron-18b", *flags, "--json"))["scenario"]["tflops"])

    assert rate() == 135
    assert rate("--machine", "h100-e1s") == pytest.approx(0.4 * 989.4)
    assert rate("--utilisation", "0.5") == 156
    assert rate("--peak-tflops", "1000") == 400


def test_a_compiled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.plan.json").write_text(json.dumps(PLAN))
    path = str(tmp_path / "a.plan.json")
    found = json.loads(printed(capsys, "--of", path, "--json"))
    assert (found["compiled"]["layers"], found["compiled"]["layer_bytes"]) == (2, 500)
    assert found["needed"]["write_bytes_s"] == 900
    (tmp_path / "b.plan.json").write_text(json.dumps(PLAN))
    both = json.loads(printed(capsys, "--of", path, str(tmp_path / "b.plan.json"), "--step-ms", "500", "--json"))
    assert both["needed"]["write_bytes_s"] == 1800 / 0.25
    assert "predicted by the plan for the machine that made it" in printed(capsys, "--of", path)
    assert "500 ms, as given" in printed(capsys, "--of", path, "--step-ms", "500")


def test_a_graph_that_runs_several_times_in_a_step_counts_as_often_as_one_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that are compiled one by one share a graph and its plan, and no plan says how many they are."""
    for name, budget in (("block", 300), ("head", 0)):
        predicted = PLAN["predicted"] | {"shared_budget_bytes": budget}
        (tmp_path / name).write_text(json.dumps(PLAN | {"graph": name, "predicted": predicted}))
    paths = str(tmp_path / "block"), str(tmp_path / "head")
    assert "block, head; each counts once, and --runs says how often a step runs it" in printed(capsys, "--of", *paths)
    found = json.loads(printed(capsys, "--of", *paths, "--runs", "4", "1", "--json"))["compiled"]
    assert (found["saved_bytes"], found["offloaded_bytes"], found["step_s"]) == (5000, 4500, 10.0)
    assert found["written_bytes"] == 4500 - 300  # the budget is one for all
    assert "block x 4, head x 4\n" in printed(capsys, "--of", *paths, "--runs", "4")


@pytest.mark.parametrize(
    ("predicted", "written"),
    [
        ({"shared_budget_bytes": 300}, 1500),
        ({"resident_bytes": 300, "shared_budget_bytes": 100}, 1400),
        ({"written_bytes": 200, "host_budget_bytes": 700}, 400),
    ],
)
def test_what_stays_in_memory_goes_to_no_drive(
    predicted: dict[str, int], written: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two graphs under one budget, which is one for both."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(json.dumps(PLAN | {"predicted": PLAN["predicted"] | predicted}))
    found = json.loads(printed(capsys, "--of", *map(str, paths), "--json"))
    assert (found["compiled"]["offloaded_bytes"], found["compiled"]["written_bytes"]) == (1800, written)
    assert found["needed"]["write_bytes_s"] == written / 2
    assert found["endurance"]["bytes_per_day"] == written / 4 * 86400


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"saved_bytes": "many"}, "invalid literal for int() with base 10: 'many'"),
        ({"offloaded_bytes": None}, "int() argument must be a string"),
        ({"predicted": []}, "list indices must be integers"),
        ({"predicted": {}}, "no 'written_bytes'"),
        ({"predicted": {"step_s": 1, "written_bytes": float("inf")}}, "cannot convert float infinity to integer"),
        ({"groups": [{"module": 3, "decision": "keep", "stored_nbytes": 1}]}, ""),
        ({"groups": [{"module": "a.0", "decision": "offload"}]}, "no 'stored_nbytes'"),
        ({"groups": [3]}, "'int' object is not subscriptable"),
    ],
)
def test_wrong_values_in_a_plan(
    changed: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(PLAN | changed))
    assert cli.main(["project", "--of", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"ssd-fx: --of {path} is no plan ({said}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model megatron-1t --memory-gib 1e308", "memory_gib=1e+308 is not possible; right would be a number of GiB"),
        ("--model megatron-1t --tbw 1e300 --json", "tbw=1e+300 is not possible; right would be a number of TB above 0"),
        ("--model megatron-1t --tbw 1e-300", "tbw=1e-300 is not possible; right would be a number of TB above 0"),
        ("--model megatron-1t --price 1e300", "price=1e+300 is not a price; right would be US dollars up to 1e+09"),
        ("--of {tmp}/instant.json", "--of {tmp}/instant.json: step_s=1e-300 is not possible; right would be a number"),
        ("--of {tmp}/resident.json", "--of {tmp}/resident.json writes nothing to drives: all stays in memory; right"),
        (
            "",
            "--layers, --width, --heads, --sequence missing; right would be a number for each, or --model with a",
        ),
        ("--model megatron-18b --width 1" + 400 * "0", "width=1"),
        ("--model megatron-18b --batch 9999999999", "batch=9999999999 is too large; right would be at most 1000000000"),
        ("--model megatron-18b --layers -3", "layers=-3 is too small; right would be a whole number from 1 on"),
        ("--model megatron-18b --tp 5", "tp=5 does not divide heads=48; right would be one of 1, 2, 3, 4, 6, 8"),
        ("--model megatron-18b --dtype fp32", "--dtype=fp32 has no rate, because peaks are those of 16 bits; right"),
        ("--model megatron-18b --capacity-tb 0", "capacity_tb=0 is not possible; right would be a number of TB"),
        ("--model megatron-18b --utilisation 2", "utilisation=2 is not possible; right would be above 0 and at most 1"),
        ("--model megatron-18b --tbw nan", "tbw=nan is not possible; right would be a number of TB above 0"),
        ("--model megatron-18b --step-ms 3", "--step-ms=3 is for --of; right would be --tflops for a model"),
        ("--of missing.json", "missing.json: No such file or directory"),
        ("--of {tmp}/no.json", "--of {tmp}/no.json is no plan (list indices must be"),
        (
            "--of {tmp}/a.json {tmp}/../{name}/a.json",
            "--of {tmp}/a.json {tmp}/../{name}/a.json names a plan twice; ",
        ),
        ("--of {tmp}/a.json --runs 0", "runs=0 is too small; right would be a whole number from 1 on"),
        (
            "--of {tmp}/a.json --runs 1 2",
            "--runs 1 2 has 2 numbers for 1 plans; right would be one for all, or one",
        ),
        ("--model megatron-18b --runs 3", "--runs=3 is for --of; right would be without it for a model"),
        ("--of {tmp}/a.json --layers 3", "--layers=3 is of a model; right would be without --of"),
        ("--of {tmp}/a.json --step-ms -1", "step_ms=-1 is not possible"),
        (
            "--of {tmp}/kept.json",
            "--of {tmp}/kept.json offloads nothing; right would be a plan made with a smaller budget",
        ),
    ],
)
def test_bad_input(flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.json").write_text("[]")
    for name, changed in {
        "a": {},
        "kept": {"offloaded_bytes": 0},
        "instant": {"predicted": {"step_s": 1e-300, "written_bytes": 900}},
        "resident": {"predicted": PLAN["predicted"] | {"shared_budget_bytes": 900}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(PLAN | changed))
    where = {"tmp": tmp_path, "name": tmp_path.name}
    assert cli.main(["project", *flags.format(**where).split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"ssd-fx: {message.format(**where)}")


@pytest.mark.parametrize(
    ("flag", "word", "said"),
    [
        ("--layers", "many", ("'many' is not possible", "right would be a whole number such as 8")),
        ("--zero", "many", ("'many' is not possible",)),
        ("--zero", "4", ("invalid choice: 4", "0, 1, 2, 3")),
        ("--model", "gpt5", ("invalid choice: 'gpt5'", "ssdtrain-8192")),
        ("--machine", "x", ("invalid choice: 'x'", "a100-40g")),
        ("--drive", "x", ("invalid choice: 'x'", "samsung-980-pro-1tb")),
        ("--dtype", "fp8", ("invalid choice: 'fp8'", "bf16")),
    ],
)
def test_a_word_that_is_not_possible(
    flag: str, word: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["project", flag, word])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ssd-fx: argument {flag}: {said[0]}")
    assert err.endswith("; ssd-fx project --help has all words\n")
    assert [part for part in said if part not in err] == []
    assert err.count("\n") == 1


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is the optional extra: pip install 'ssd_fx[plot]'")
    from examples import plot_projection

    (tmp_path / "a.json").write_text(json.dumps(PLAN))
    for name, words in {"model": ["--model", "megatron-1t"], "plan": ["--of", str(tmp_path / "a.json")]}.items():
        plot_projection.main([str(tmp_path / f"{name}.png"), *words])
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
