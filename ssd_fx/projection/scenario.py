"""What a projection is of: a model, how it is split over GPUs, the GPU, and its drives.

The flags of `ssd-fx project` are these fields, and their words are said here once.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ssd_fx.projection.checks import divides, positive, price, whole

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def _whole(meaning: str, default: Any = MISSING) -> Any:
    """A field that is a whole number from 1 on, or from its default on."""
    return field(default=default, metadata={"meaning": meaning, "least": 1 if default is MISSING else default})


def _positive(meaning: str, unit: str) -> Any:
    return field(metadata={"meaning": meaning, "unit": unit})


def _chosen(meaning: str, default: Any) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """Raises a ValueError for a number that is not possible."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if "least" in each.metadata:
                whole(each.name, getattr(self, each.name), each.metadata["least"])
            if "unit" in each.metadata:
                positive(each.name, getattr(self, each.name), each.metadata["unit"])


@dataclass(frozen=True, kw_only=True)
class Model(_Checked):
    """A transformer."""

    layers: int = _whole("layers")
    width: int = _whole("hidden size")
    heads: int = _whole("attention heads")
    sequence: int = _whole("tokens of a sequence")
    vocabulary: int = _whole("tokens of the vocabulary", 0)  # 0 if embedding and head are of no interest
    kv_heads: int = _whole("heads of keys and values (grouped-query attention); default: as many as heads", 0)
    ffn: int = _whole("inner width of the MLP; default: four times the width", 0)
    gated: bool = _chosen("the MLP is gated", False)  # SwiGLU, GEGLU: three matrices instead of two
    dropout: bool = _chosen("with dropout", True)  # after attention, after the MLP, and after the embedding
    tied: bool = _chosen("the head has the matrix of the embedding", True)
    dtype: str = _chosen("of activations: fp16, bf16 or fp32", "fp16")
    attention: str = _chosen("flash or matrix", "flash")  # flash saves no sequence x sequence matrix

    def __post_init__(self) -> None:
        super().__post_init__()
        divides("heads", self.heads, "width", self.width)
        divides("kv_heads", self.kv_heads or self.heads, "heads", self.heads)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def kv_width(self) -> int:
        """The width of all keys of a token, and of all values."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def inner(self) -> int:
        """The inner width of the MLP."""
        return self.ffn or 4 * self.width


@dataclass(frozen=True, kw_only=True)
class Parallelism(_Checked):
    """How a model and its batch are split over GPUs."""

    tp: int = _whole("GPUs that share a layer (tensor parallel)", 1)
    pp: int = _whole("pipeline stages", 1)
    dp: int = _whole("GPUs with a share of the batch (data parallel)", 1)
    sp: bool = _chosen("sequence parallel", False)  # splits over `tp` GPUs what tensor parallelism alone leaves whole
    zero: int = _chosen("stage of ZeRO, 0 to 3", 0)  # over `dp` GPUs: 1 optimizer's state, 2 gradients too, 3 weights

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class _Bought(_Checked):
    name: str
    price_usd: float = 0.0  # 0 if it is not known

    def __post_init__(self) -> None:
        super().__post_init__()
        price(self.price_usd)


@dataclass(frozen=True, kw_only=True)
class Device(_Bought):
    """One GPU. Its peak is that of dense products in 16 bits."""

    peak_tflops: float = _positive("its peak, instead of --tflops", "TFLOP/s")
    memory_gib: float = _positive("its memory", "GiB")
    memory_gbps: float = _positive("10^9 bytes a second of its memory", "GB/s")
    link_gbps: float = _positive("10^9 bytes a second each way of its PCIe", "GB/s")


@dataclass(frozen=True, kw_only=True)
class Drive(_Bought):
    """One drive."""

    write_gbps: float = _positive("10^9 bytes a second that one drive writes", "GB/s")
    read_gbps: float = _positive("10^9 bytes a second that one drive reads", "GB/s")
    capacity_tb: float = _positive("10^12 bytes that one drive holds", "TB")
    tbw: float = _positive("rated endurance of one drive, in 10^12 bytes", "TB")


@dataclass(frozen=True, kw_only=True)
class Drives:
    """The drives of one GPU: `count` of a kind, striped. Four drives of a node of eight GPUs are 0.5.

    link_gbps: what passes between them and the GPU, 10^9 bytes a second each way.
    """

    drive: Drive
    count: float
    link_gbps: float

    def __post_init__(self) -> None:
        positive("drives", self.count, "drives per GPU")
        positive("link_gbps", self.link_gbps, "GB/s")

    @property
    def write_bytes_s(self) -> float:
        return min(self.count * self.drive.write_gbps, self.link_gbps) * 1e9

    @property
    def read_bytes_s(self) -> float:
        return min(self.count * self.drive.read_gbps, self.link_gbps) * 1e9

    @property
    def nbytes(self) -> float:
        """What they hold."""
        return self.count * self.drive.capacity_tb * 1e12

    @property
    def rated_tb(self) -> float:
        """What they may be written in all, as rated, in 10^12 bytes."""
        return self.count * self.drive.tbw

    @property
    def price_usd(self) -> float:
        return self.count * self.drive.price_usd


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a projection needs.

    batch: the micro-batch, in sequences.
    tflops: what one GPU achieves, in 10^12 floating point operations a second. tflops_source: who says so.
    head: count the embedding's dropout, the last norm and the head too; the paper counts the layers alone.
    """

    model: Model
    parallelism: Parallelism
    batch: int
    tflops: float
    device: Device
    drives: Drives
    head: bool = True
    optimizer: str = "adam"
    tflops_source: str = "as given"

    def __post_init__(self) -> None:
        whole("batch", self.batch)
        positive("tflops", self.tflops, "TFLOP/s")
        split = self.parallelism
        divides("tp", split.tp, "heads", self.model.heads)
        divides("tp", split.tp, "ffn", self.model.inner)
        kv_heads = self.model.kv_heads or self.model.heads
        if kv_heads % split.tp and split.tp % kv_heads:
            raise ValueError(f"tp={split.tp} splits kv_heads={kv_heads} unevenly; right would be a divisor of it")
        divides("pp", split.pp, "layers", self.model.layers)
        if split.sp:
            divides("tp", split.tp, "sequence", self.model.sequence)

    @property
    def layers_per_gpu(self) -> int:
        return self.model.layers // self.parallelism.pp
