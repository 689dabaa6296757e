"""Known models, GPUs and drives. docs/projection.md, section 7, has the sources.

Megatron-LM rows: shapes and splits from `examples/sc21/run_table_1.sh` of NVIDIA/Megatron-LM; rates from Narayanan et
al. 2021 (arXiv 2104.04473), table 1, A100-80G, with all activations recomputed. `megatron-175b-sp` is of Korthikanti
et al. 2022 (arXiv 2205.05198), 51.4% of 312 TFLOP/s. `ssdtrain-*` are shapes of arXiv 2408.10013; 130 TFLOP/s are
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ssd_fx.projection.scenario import Device, Drive, Drives, Model, Parallelism

UTILISATION = 0.4  # of the peak, where nothing says what a GPU achieves


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model as it was, or would be, trained. tflops: what a GPU of `machine` achieves; 0 if not known."""

    model: Model
    parallelism: Parallelism
    batch: int
    machine: str
    tflops: float = 0.0
    head: bool = False
    optimizer: str = "adam"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU and its drives."""

    device: Device
    drives: Drives


DRIVES = {
    drive.name: drive
    for drive in (
        Drive(name="samsung-980-pro-1tb", capacity_tb=1.0, write_gbps=5.0, read_gbps=7.0, tbw=600, price_usd=90),
        Drive(name="samsung-pm9d3a-7.68tb-u2", capacity_tb=7.68, write_gbps=6.8, read_gbps=12.0, tbw=14016),
        Drive(name="micron-9550-max-6.4tb-u2", capacity_tb=6.4, write_gbps=10.0, read_gbps=14.0, tbw=35040),
        Drive(name="micron-9550-pro-7.68tb-e1s", capacity_tb=7.68, write_gbps=10.0, read_gbps=14.0, tbw=14016),
    )
}

_PCIE_4, _PCIE_5 = 31.5, 63.0  # GB/s each way of 16 lanes: 16 and 32 GT/s, of which 128 of 130 bits are data

_A100_40 = Device(name="A100-40G", peak_tflops=312, memory_gib=40, link_gbps=_PCIE_4, price_usd=10000)
_A100_80 = Device(name="A100-80G", peak_tflops=312, memory_gib=80, link_gbps=_PCIE_4)
_H100 = Device(name="H100-SXM-80G", peak_tflops=989.4, memory_gib=80, link_gbps=_PCIE_5)


def _with(device: Device, count: int, drive: str) -> Machine:
    return Machine(device=device, drives=Drives(drive=DRIVES[drive], count=count, link_gbps=device.link_gbps))


MACHINES = {
    "a100-40g": _with(_A100_40, 4, "samsung-980-pro-1tb"),
    "a100-80g": _with(_A100_80, 4, "samsung-980-pro-1tb"),
    "h100-u2": _with(_H100, 2, "samsung-pm9d3a-7.68tb-u2"),
    "h100-u2-max": _with(_H100, 2, "micron-9550-max-6.4tb-u2"),
    "h100-e1s": _with(_H100, 2, "micron-9550-pro-7.68tb-e1s"),
}
DEFAULT_MACHINE = "a100-40g"


def _megatron(*shape: int, gpus: int, tflops: float) -> Run:
    """shape: layers, width, heads, pp, micro-batch; TP is 8. The paper projects with sequence parallelism."""
    layers, width, heads, pp, batch = shape
    return Run(
        model=Model(layers=layers, width=width, heads=heads, sequence=2048, vocabulary=51200),
        parallelism=Parallelism(tp=8, pp=pp, dp=gpus // (8 * pp), sp=True),
        batch=batch,
        machine="a100-80g",
        tflops=tflops,
    )


def _ssdtrain(width: int, layers: int) -> Run:
    return Run(
        model=Model(layers=layers, width=width, heads=width // 128, sequence=1024, vocabulary=51200),
        parallelism=Parallelism(tp=2),
        batch=16,
        machine="a100-40g",
        tflops=130,
        optimizer="sgd",
    )


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
_LLAMA_3_70B_SPLIT = Parallelism(tp=8, pp=4, dp=8, sp=True, zero=1)

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
    "llama-3-8b": Run(model=_LLAMA_3_8B, parallelism=Parallelism(dp=8, zero=3), batch=1, machine="h100-u2", head=True),
    "llama-3-70b": Run(model=_LLAMA_3_70B, parallelism=_LLAMA_3_70B_SPLIT, batch=1, machine="h100-u2", head=True),
}
