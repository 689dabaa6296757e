"""Figures of the reference paper (arXiv 2408.10013) and of our own runs, out of the formulas."""

from __future__ import annotations

import pytest
from projection.__main__ import projected
from projection.formulas import StepIO, endurance, layer_bytes, layer_flops, outside_bytes
from projection.presets import RUNS
from projection.scenario import Model, Parallelism

from ssd_fx.hardware import DRIVES, Drives

GPT = Model(layers=12, width=384, heads=6, sequence=512, vocabulary=256, dtype="fp32")  # of benchmarks/gpt_step.py


def write_gbps(name: str) -> float:
    return projected(["--model", name]).traffic.write_bytes_s / 1e9


@pytest.mark.parametrize(("width", "gbps"), [(8192, 19.0), (12288, 12.8), (16384, 9.6)])
def test_the_three_widths_at_130_tflops(width: int, gbps: float) -> None:
    assert write_gbps(f"ssdtrain-{width}") == pytest.approx(gbps, abs=0.05)


@pytest.mark.parametrize(("name", "gbps"), [("megatron-145b", 11.1), ("megatron-1t", 5.9)])
def test_megatron_rows(name: str, gbps: float) -> None:
    assert write_gbps(name) == pytest.approx(gbps, abs=0.05)


def test_rates_on_both_sides_of_the_largest_of_the_paper() -> None:
    """12.1 GB/s. Which configuration the paper took stands in a figure that we do not have. Narrow models need more."""
    rates = {name: write_gbps(name) for name in RUNS if name.startswith("megatron")}
    more = {name: rate for name, rate in rates.items() if rate > 12.1}
    assert more == pytest.approx({"megatron-18b": 19.7, "megatron-39b": 15.3, "megatron-76b": 12.5}, abs=0.05)
    assert rates["megatron-175b-sp"] == pytest.approx(12.0, abs=0.05)


def test_the_life_of_four_drives_of_600_tbw_at_the_largest_rate() -> None:
    """The paper's "over 2 years" is with its factors. Rated TBW alone gives days."""
    step_s = 1.0
    traffic = StepIO(nbytes=12.1e9 * step_s / 2, forward_s=step_s / 3, step_s=step_s)
    life = endurance(traffic, Drives(drive=DRIVES["samsung-980-pro-1tb"], count=4, link_gbps=31.5))
    assert life.rated_days == pytest.approx(4.6, abs=0.05)
    assert life.paper_waf_days == pytest.approx(11.5, abs=0.05)
    assert life.paper_days / 365 == pytest.approx(2.7, abs=0.05)
    assert life.paper_days / 365 > 2


def test_the_cost_of_the_drives() -> None:
    found = projected(["--model", "ssdtrain-12288"])
    assert (found.endurance.drives_usd, found.scenario.device_usd) == (360, 10000)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("megatron-18b", 18.4),
        ("megatron-39b", 39.1),
        ("megatron-76b", 76.1),
        ("megatron-145b", 145.6),
        ("megatron-310b", 310.1),
        ("megatron-530b", 529.6),
        ("megatron-1t", 1008.0),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    assert projected(["--model", name]).parameters / 1e9 == pytest.approx(billions, rel=0.002)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_bytes_of_a_layer_of_gpt(tp: int) -> None:
    """s*b*h*(10 + 24/t), with sequence parallelism 34*s*b*h/t (Korthikanti et al. 2022)."""
    model = Model(layers=1, width=1024, heads=16, sequence=2048)
    sbh = 2048 * 4 * 1024
    assert layer_bytes(model, Parallelism(tp=tp), 4) == pytest.approx(sbh * (10 + 24 / tp))
    assert layer_bytes(model, Parallelism(tp=tp, sp=True), 4) == pytest.approx(sbh * 34 / tp)


def test_the_matrices_of_attention() -> None:
    """5*a*s^2*b in 16 bits (Korthikanti et al. 2022)."""
    flash, matrix = (Model(layers=1, width=64, heads=4, sequence=32, attention=kind) for kind in ("flash", "matrix"))
    split = Parallelism(tp=2)
    assert layer_bytes(matrix, split, 3) - layer_bytes(flash, split, 3) == 5 * 4 * 32**2 * 3 / 2


def test_operations_of_a_layer_of_gpt() -> None:
    s, b, h = 2048, 4, 1024
    assert layer_flops(Model(layers=1, width=h, heads=16, sequence=s), b) == 24 * s * b * h**2 + 4 * s**2 * b * h


def test_our_run_of_12_layers() -> None:
    """In docs/results: 1205.5 MiB written in a step, 67 bytes per s*b*h and layer; in 16 bits 34 for a layer."""
    sbh = 512 * 8 * 384
    alone = layer_bytes(GPT, Parallelism(), 8)
    written = 12 * alone + outside_bytes(GPT, Parallelism(), 8)
    assert alone / sbh == 66
    assert written / 2**20 == 1205.5
    assert written / (12 * sbh) == pytest.approx(67, abs=0.05)
    half = Model(layers=12, width=384, heads=6, sequence=512, dtype="bf16")
    assert layer_bytes(half, Parallelism(), 8) / sbh == 34
