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
class Training:
    """A model as it was, or would be, trained. tflops: what a GPU of `machine` achieves; 0 if not known."""

    model: Model
    parallelism: Parallelism
    batch: int
    machine: str
    tflops: float = 0.0
    head: bool = False
    optimizer: str = "adam"


@dataclass(frozen=True, kw_only=True)
class Hardware:
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
        Drive(name="samsung-990-pro-2tb", capacity_tb=2.0, write_gbps=6.9, read_gbps=7.45, tbw=1200),
        Drive(name="samsung-9100-pro-2tb", capacity_tb=2.0, write_gbps=13.4, read_gbps=14.7, tbw=1200),
        Drive(name="samsung-9100-pro-4tb", capacity_tb=4.0, write_gbps=13.4, read_gbps=14.7, tbw=2400),
        Drive(name="wd-black-sn850x-2tb", capacity_tb=2.0, write_gbps=6.6, read_gbps=7.3, tbw=1200),
        Drive(name="crucial-t700-2tb", capacity_tb=2.0, write_gbps=11.8, read_gbps=12.4, tbw=1200),
        Drive(name="crucial-t700-4tb", capacity_tb=4.0, write_gbps=11.8, read_gbps=12.4, tbw=2400),
        Drive(name="crucial-t705-2tb", capacity_tb=2.0, write_gbps=12.7, read_gbps=14.5, tbw=1200),
        Drive(name="samsung-pm1753-7.68tb-u2", capacity_tb=7.68, write_gbps=10.0, read_gbps=14.5, tbw=14016),
        Drive(name="intel-d7-p5500-7.68tb-u2", capacity_tb=7.68, write_gbps=4.3, read_gbps=7.0, tbw=14016),
        Drive(name="intel-d7-p5600-6.4tb-u2", capacity_tb=6.4, write_gbps=4.3, read_gbps=7.0, tbw=35040),
        Drive(name="kioxia-cm6-30.72tb-u3", capacity_tb=30.72, write_gbps=4.2, read_gbps=6.9, tbw=56064),
        Drive(name="kioxia-cd6-15.36tb-u3", capacity_tb=15.36, write_gbps=4.0, read_gbps=6.2, tbw=28032),
    )
}

_PCIE_4, _PCIE_5 = 31.5, 63.0  # GB/s each way of 16 lanes: 16 and 32 GT/s, of which 128 of 130 bits are data

_MEASURED_FLOPS, _MEASURED_MEMORY = 0.65, 0.85  # of their peaks, by `ssd-fx calibrate` on an H200: docs/results/gpu
_LATENCY_S = 1e-4  # of a transfer


def _device(name: str, tflops: float, gib: float, gbps: float, link: float = _PCIE_5, usd: float = 0.0) -> Device:
    return Device(name=name, peak_tflops=tflops, memory_gib=gib, memory_gbps=gbps, link_gbps=link, price_usd=usd)


_A100_40 = _device("A100-40G", 312, 40, 1555, _PCIE_4, 10000)
_A100_80 = _device("A100-80G", 312, 80, 2039, _PCIE_4)
_H100 = _device("H100-SXM-80G", 989.4, 80, 3350)


def _with(device: Device, count: int, drive: str) -> Hardware:
    return Hardware(device=device, drives=Drives(drive=DRIVES[drive], count=count, link_gbps=device.link_gbps))


MACHINES = {
    "a100-40g": _with(_A100_40, 4, "samsung-980-pro-1tb"),
    "a100-80g": _with(_A100_80, 4, "samsung-980-pro-1tb"),
    "h100-u2": _with(_H100, 2, "samsung-pm9d3a-7.68tb-u2"),
    "h100-u2-max": _with(_H100, 2, "micron-9550-max-6.4tb-u2"),
    "h100-e1s": _with(_H100, 2, "micron-9550-pro-7.68tb-e1s"),
    "a100": _with(_A100_80, 2, "intel-d7-p5500-7.68tb-u2"),
    "h100": _with(_H100, 2, "samsung-pm9d3a-7.68tb-u2"),
    "h200": _with(_device("H200-SXM", 989.4, 141, 4800), 2, "samsung-pm9d3a-7.68tb-u2"),
    "b200": _with(_device("B200-SXM", 2250, 180, 7700), 2, "samsung-pm1753-7.68tb-u2"),
    "mi300x": _with(_device("MI300X", 1307.4, 192, 5300), 2, "samsung-pm9d3a-7.68tb-u2"),
    "l40s": _with(_device("L40S", 362, 48, 864, _PCIE_4), 2, "intel-d7-p5500-7.68tb-u2"),
    "4090": _with(_device("RTX-4090", 165.2, 24, 1008, _PCIE_4), 1, "samsung-990-pro-2tb"),
    "5090": _with(_device("RTX-5090", 209.5, 32, 1792), 1, "samsung-9100-pro-2tb"),
}
DEFAULT_MACHINE = "a100-40g"


def rates(device: Device, drives: Drives) -> dict[str, float]:
    """What a plan is made with (the option `machine`) for a GPU that is not here. In 16 bits, alone with its drives."""
    return {
        "flops": _MEASURED_FLOPS * device.peak_tflops * 1e12,
        "memory_bw": _MEASURED_MEMORY * device.memory_gbps * 1e9,
        "write_bw": drives.write_bytes_s,
        "read_bw": drives.read_bytes_s,
        "latency_s": _LATENCY_S,
    }


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
