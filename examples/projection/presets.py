"""Known models, and what GPUs and drives cost. docs/projection.md, section 7, has the sources.

Megatron-LM rows: shapes and splits from `examples/sc21/run_table_1.sh` of NVIDIA/Megatron-LM; rates from Narayanan et
al. 2021 (arXiv 2104.04473), table 1, A100-80G, with all activations recomputed. The paper projects with sequence
parallelism. `megatron-175b-sp` is of Korthikanti et al. 2022 (arXiv 2205.05198), 51.4% of 312 TFLOP/s. `ssdtrain-*` are
shapes of arXiv 2408.10013; 130 TFLOP/s are assumed.
"""

from __future__ import annotations

from typing import NamedTuple

UTILISATION = 0.4  # of the peak, where nothing says what a GPU achieves
USD = {"A100-40G": 10_000.0, "samsung-980-pro-1tb": 90.0}  # of the paper's projection; other prices change too often


class Preset(NamedTuple):
    """Words of the command line that go before the user's. tflops: what a GPU of their machine achieves, if known."""

    words: str = ""
    tflops: float = 0.0


_MEGATRON = "--no-head --sequence 2048 --vocabulary 51200 --tp 8 --sp --machine a100-80g"
_SSDTRAIN = "--no-head --sequence 1024 --vocabulary 51200 --tp 2 --batch 16 --optimizer sgd --machine a100-40g"
_LLAMA = (
    "--kv-heads 8 --gated --no-dropout --no-tied --sequence 8192 --vocabulary 128256 --dtype bf16 --machine h100-u2"
)

RUNS = {
    "ssdtrain-8192": Preset(f"{_SSDTRAIN} --layers 4 --width 8192 --heads 64", 130),
    "ssdtrain-12288": Preset(f"{_SSDTRAIN} --layers 3 --width 12288 --heads 96", 130),
    "ssdtrain-16384": Preset(f"{_SSDTRAIN} --layers 2 --width 16384 --heads 128", 130),
    "megatron-18b": Preset(f"{_MEGATRON} --layers 40 --width 6144 --heads 48 --pp 1 --dp 32 --batch 8", 135),
    "megatron-39b": Preset(f"{_MEGATRON} --layers 48 --width 8192 --heads 64 --pp 2 --dp 32 --batch 4", 138),
    "megatron-76b": Preset(f"{_MEGATRON} --layers 60 --width 10240 --heads 80 --pp 4 --dp 32 --batch 2", 140),
    "megatron-145b": Preset(f"{_MEGATRON} --layers 80 --width 12288 --heads 96 --pp 8 --dp 24 --batch 2", 148),
    "megatron-310b": Preset(f"{_MEGATRON} --layers 96 --width 16384 --heads 128 --pp 16 --dp 15 --batch 1", 155),
    "megatron-530b": Preset(f"{_MEGATRON} --layers 105 --width 20480 --heads 128 --pp 35 --dp 9 --batch 1", 163),
    "megatron-1t": Preset(f"{_MEGATRON} --layers 128 --width 25600 --heads 160 --pp 64 --dp 6 --batch 1", 163),
    "megatron-175b-sp": Preset(f"{_MEGATRON} --layers 96 --width 12288 --heads 96 --pp 8 --batch 1", 0.514 * 312),
    "llama-3-8b": Preset(f"{_LLAMA} --layers 32 --width 4096 --heads 32 --ffn 14336 --dp 8 --zero 3"),
    "llama-3-70b": Preset(
        f"{_LLAMA} --layers 80 --width 8192 --heads 64 --ffn 28672 --tp 8 --pp 4 --dp 8 --sp --zero 1"
    ),
}
