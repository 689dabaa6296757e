"""Known models, and what GPUs and drives cost. docs/projection.md, section 7, has the sources.

Megatron-LM rows: shapes and splits from `examples/sc21/run_table_1.sh` of NVIDIA/Megatron-LM; rates from Narayanan et
al. 2021 (arXiv 2104.04473), table 1, A100-80G, with all activations recomputed. `megatron-175b-sp` is of Korthikanti
et al. 2022 (arXiv 2205.05198), 51.4% of 312 TFLOP/s. `ssdtrain-*` are shapes of arXiv 2408.10013; 130 TFLOP/s are
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from projection.scenario import Model, Parallelism

DEFAULT_MACHINE = "a100-40g"
UTILISATION = 0.4  # of the peak, where nothing says what a GPU achieves
USD = {"A100-40G": 10_000.0, "samsung-980-pro-1tb": 90.0}  # of the paper's projection; other prices change too often


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model as it was, or would be, trained. tflops: what a GPU of `machine` achieves; 0 if not known."""

    model: Model
    parallelism: Parallelism
    batch: int
    machine: str
    tflops: float = 0.0
    head: bool = False
    optimizer: str = "adam"


def _megatron(*shape: int, gpus: int, tflops: float) -> Training:
    """shape: layers, width, heads, pp, micro-batch; TP is 8. The paper projects with sequence parallelism."""
    layers, width, heads, pp, batch = shape
    return Training(
        model=Model(layers=layers, width=width, heads=heads, sequence=2048, vocabulary=51200),
        parallelism=Parallelism(tp=8, pp=pp, dp=gpus // (8 * pp), sp=True),
        batch=batch,
        machine="a100-80g",
        tflops=tflops,
    )


def _ssdtrain(width: int, layers: int) -> Training:
    return Training(
        model=Model(layers=layers, width=width, heads=width // 128, sequence=1024, vocabulary=51200),
        parallelism=Parallelism(tp=2),
        batch=16,
        machine="a100-40g",
        tflops=130,
        optimizer="sgd",
    )


def _llama(model: Model, split: Parallelism) -> Training:
    return Training(model=model, parallelism=split, batch=1, machine="h100-u2", head=True)


_LLAMA_3_8B = Model(
    layers=32,
    width=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    gated=True,
    dropout=False,
    tied=False,
    sequence=8192,
    vocabulary=128256,
    dtype="bf16",
)
_LLAMA_3_70B = replace(_LLAMA_3_8B, layers=80, width=8192, heads=64, ffn=28672)

RUNS = {
    "ssdtrain-8192": _ssdtrain(8192, 4),
    "ssdtrain-12288": _ssdtrain(12288, 3),
    "ssdtrain-16384": _ssdtrain(16384, 2),
    "megatron-18b": _megatron(40, 6144, 48, 1, 8, gpus=256, tflops=135),
    "megatron-39b": _megatron(48, 8192, 64, 2, 4, gpus=512, tflops=138),
    "megatron-76b": _megatron(60, 10240, 80, 4, 2, gpus=1024, tflops=140),
    "megatron-145b": _megatron(80, 12288, 96, 8, 2, gpus=1536, tflops=148),
    "megatron-310b": _megatron(96, 16384, 128, 16, 1, gpus=1920, tflops=155),
    "megatron-530b": _megatron(105, 20480, 128, 35, 1, gpus=2520, tflops=163),
    "megatron-1t": _megatron(128, 25600, 160, 64, 1, gpus=3072, tflops=163),
    "megatron-175b-sp": _megatron(96, 12288, 96, 8, 1, gpus=64, tflops=0.514 * 312),
    "llama-3-8b": _llama(_LLAMA_3_8B, Parallelism(dp=8, zero=3)),
    "llama-3-70b": _llama(_LLAMA_3_70B, Parallelism(tp=8, pp=4, dp=8, sp=True, zero=1)),
}
