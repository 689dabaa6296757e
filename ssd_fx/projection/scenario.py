"""What a projection is of: a model, how it is split over GPUs, the GPU, and its drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ssd_fx.projection.checks import divides, positive, price, whole

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer.

    layers, width (hidden size), heads, sequence (tokens): as usual.
    vocabulary: 0 if embedding and head are of no interest.
    kv_heads: fewer than `heads` for grouped-query attention; 0 for as many.
    ffn: the inner width of the MLP; 0 for four times `width`.
    gated: the MLP has a gate (SwiGLU, GEGLU), so three matrices instead of two.
    dropout: after attention, after the MLP, and after the embedding.
    tied: the head has the matrix of the embedding.
    dtype: of the activations.
    attention: "flash" saves no sequence x sequence matrix, "matrix" does.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int = 0
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    dropout: bool = True
    tied: bool = True
    dtype: str = "fp16"
    attention: str = "flash"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "sequence"):
            whole(name, getattr(self, name))
        for name in ("vocabulary", "kv_heads", "ffn"):
            whole(name, getattr(self, name), least=0)
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
class Parallelism:
    """How many GPUs share a layer (tp), the layers (pp), the batch (dp).

    sp: sequence parallelism, which splits over `tp` GPUs what tensor parallelism alone leaves whole.
    zero: the stage of ZeRO, over `dp` GPUs: 1 splits the optimizer's state, 2 gradients too, 3 weights too.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    zero: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            whole(name, getattr(self, name))

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part that one buys. Of its fields all that are in `UNITS` are above 0. price_usd: 0 if not known."""

    UNITS: ClassVar[dict[str, str]]

    name: str
    price_usd: float = 0.0

    def __post_init__(self) -> None:
        for name, unit in self.UNITS.items():
            positive(name, getattr(self, name), unit)
        price(self.price_usd)


@dataclass(frozen=True, kw_only=True)
class Device(_Part):
    """One GPU. peak_tflops: of dense products in 16 bits. memory_gbps: 10^9 bytes a second of its memory. link_gbps: of
    its PCIe, the same each way."""

    UNITS: ClassVar = {"peak_tflops": "TFLOP/s", "memory_gib": "GiB", "memory_gbps": "GB/s", "link_gbps": "GB/s"}

    peak_tflops: float
    memory_gib: float
    memory_gbps: float
    link_gbps: float


@dataclass(frozen=True, kw_only=True)
class Drive(_Part):
    """One drive. Rates in 10^9 bytes a second; capacity and tbw, its rated endurance, in 10^12 bytes."""

    UNITS: ClassVar = {"write_gbps": "GB/s", "read_gbps": "GB/s", "capacity_tb": "TB", "tbw": "TB"}

    write_gbps: float
    read_gbps: float
    capacity_tb: float
    tbw: float


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
