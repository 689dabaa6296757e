"""`python examples/projection`: its words, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from projection import text
from projection.__main__ import projected

from tests import fresh

ROOT = Path(__file__).parents[2]


def printed(*words: str) -> str:
    return text.of_scenario(projected(words))


def test_as_a_command() -> None:
    """In a process of its own, which finds the example by itself: an answer, and a wrong number."""
    program = f"import runpy; runpy.run_path({str(ROOT / 'examples/projection')!r}, run_name='__main__')"
    said, refused = (fresh.run(program, "--model", "megatron-18b", *more) for more in ([], ["--tp=5"]))
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.startswith("model        18.43 B parameters, 40 layers")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("projection: tp=5 does not divide heads=48; right would be one of 1, 2, 3,")


def test_a_preset_as_text() -> None:
    lines = printed("--model", "ssdtrain-12288").splitlines()
    rows = {line[:11].strip(): line[13:] for line in lines}
    assert rows["write rate"].startswith("12.8 GB/s within half the step (the paper's measure)")
    assert rows["drive life"].endswith("by rated TBW (4 x 600 TB)")
    rated = next(i for i, line in enumerate(lines) if line.startswith("drive life"))
    assert "with WAF 2.5" in lines[rated + 1]
    assert lines[rated + 2].strip() == "these are the reference paper's assumptions, which no vendor guarantees"
    assert rows["cost"].startswith("$360 of drives per GPU, 3.6% of what that costs; $720 for 2 GPUs")


def test_single_values_go_over_presets() -> None:
    flags = ("--drives", "3", "--tbw", "1000", "--price", "70", "--tp", "4", "--batch", "1", "--tflops", "99")
    found = projected(["--model", "ssdtrain-8192", *flags]).scenario
    assert (found.drives.count, found.drives.drive.tbw, found.drive_usd) == (3, 1000, 70)
    assert found.drives.drive.name == "samsung-980-pro-1tb, changed"
    assert (found.parallelism.tp, found.batch, found.tflops) == (4, 1, 99)


def test_a_model_by_its_numbers() -> None:
    shape = "--layers 2 --width 64 --heads 4 --kv-heads 2 --sequence 32 --vocabulary 9 --gated --no-dropout"
    found = projected([*shape.split(), "--machine", "h100-u2"])
    assert found.outside_bytes == 32 * 2 * (2 * 64 + 9)
    assert found.layer_bytes == 32 * 2 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 256)
    assert found.scenario.tflops == pytest.approx(0.4 * 989.4)
    assert found.scenario.tflops_source == "40% of its peak, a guess"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tflops 99", "at 99 TFLOP/s (as given);"),
        ("--utilisation 0.5", "at 156 TFLOP/s (50% of its peak);"),
        ("--peak-tflops 1000", "at 400 TFLOP/s (40% of its peak, a guess);"),
        ("--machine h100-e1s", "at 395.8 TFLOP/s (40% of its peak, a guess);"),  # another GPU than the preset's
        ("", "at 135 TFLOP/s (of the preset);"),
    ],
)
def test_the_text_says_where_the_rate_is_from(flags: str, said: str) -> None:
    assert said in printed("--model", "megatron-18b", *flags.split())


def test_a_node_with_fewer_drives_than_gpus_and_a_model_that_does_not_fit() -> None:
    out = printed("--model", "llama-3-70b", "--drives", "0.5")
    assert "0.5 x samsung-pm9d3a-7.68tb-u2 per GPU" in out
    assert "6 per GPU within half the step, 9 within the forward, of these drives" in out
    large = printed("--model", "llama-3-70b", "--tp", "1", "--pp", "1", "--zero", "0")
    assert "too much; right would be a larger --tp, --pp or --zero" in large


def test_the_text_says_what_limits_the_micro_batch() -> None:
    full = printed("--model", "megatron-1t", "--drives", "2")
    assert "2 TB on the drives, which have room for no more)" in full
    assert "not even 1 fits on the drives" in printed("--model", "megatron-1t", "--capacity-tb", "0.001")
    slow = printed("--model", "megatron-18b", "--drives", "1")
    assert "the drives are too slow for more than 25.4% of the activations; the rest must stay" in slow
    assert ", 74.6% of the activations kept)" in slow


def test_the_link_of_the_gpu_may_be_too_slow_for_all_drives() -> None:
    """Drives of 54 GB/s behind PCIe 5.0 are not the limit for 30 GB/s; behind a link of 10 GB/s it is."""
    many = ("--model", "llama-3-70b", "--drives", "8")
    assert "the writes hide within half the step" in printed(*many)
    behind = printed(*many, "--link-gbps", "10")
    assert "; the link has 10 GB/s each way" in behind
    assert "the link is too slow for more than 27.3% of the activations" in behind


def test_drives_that_read_too_slowly_are_the_limit_and_not_the_link() -> None:
    """They write faster than the link."""
    slow = printed("--model", "llama-3-8b", "--write-gbps", "100", "--read-gbps", "0.5", "--drives", "1")
    assert "the drives are too slow for more than 1% of the activations" in slow


def test_nearly_all_is_not_all() -> None:
    needed = projected(["--model", "megatron-18b"]).traffic.write_bytes_s / 1e9
    out = printed("--model", "megatron-18b", "--drives", "1", "--read-gbps", "30", "--write-gbps", str(0.9989 * needed))
    assert "too slow for more than 99.8% of the activations; the rest must stay" in out
    assert "; 99.8% of the activations\n" in out


def test_what_a_checkpoint_around_every_layer_would_take_instead() -> None:
    out = printed("--model", "llama-3-70b")
    assert "around every layer: 426 ms for forward and backward (+32%), peak 1.512 GiB, micro-batch at most 45" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--layers, --width, --heads, --sequence missing; right would be a number for each, or --model with a"),
        ("--model megatron-18b --tp 5", "tp=5 does not divide heads=48; right would be one of 1, 2, 3, 4, 6, 8"),
        ("--model megatron-18b --dtype fp32", "--dtype=fp32 has no rate, because peaks are those of 16 bits; right"),
    ],
)
def test_numbers_that_do_not_go_together(flags: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011, its text is compared
        projected(flags.split())
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("flag", "word", "said"),
    [
        ("--layers", "many", "'many' is not possible; right would be a whole number from 1 to 1e+09"),
        ("--layers", "-3", "'-3' is not possible; right would be a whole number from 1 to 1e+09"),
        ("--batch", "9999999999", "'9999999999' is not possible; right would be a whole number from 1 to 1e+09"),
        ("--zero", "4", "'4' is not possible; right would be a whole number from 0 to 3"),
        ("--capacity-tb", "0", "'0' is not possible; right would be a number from 1e-09 to 1e+09"),
        ("--memory-gib", "1e308", "'1e308' is not possible"),
        ("--tbw", "nan", "'nan' is not possible"),
        ("--utilisation", "2", "'2' is not possible; right would be a number from 1e-09 to 1"),
        ("--price", "-1", "'-1' is not possible; right would be a number from 0 to 1e+09"),
        ("--model", "gpt5", "invalid choice: 'gpt5'"),
        ("--machine", "x", "invalid choice: 'x'"),
        ("--drive", "x", "invalid choice: 'x'"),
        ("--dtype", "fp8", "invalid choice: 'fp8'"),
    ],
)
def test_a_word_that_is_not_possible(flag: str, word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        projected(["--model", "megatron-18b", f"{flag}={word}"])
    assert f"error: argument {flag}: {said}" in capsys.readouterr().err
