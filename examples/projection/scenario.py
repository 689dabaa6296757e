"""What a projection is of: a model, how it is split over GPUs, the GPU, and its drives."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.hardware import Device, Drives

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def divides(name: str, divisor: int, of: str, number: int) -> None:
    """Raises:
    ValueError: `divisor` does not divide `number`; the message has the numbers that do.
    """
    if number % divisor:
        right = ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)
        raise ValueError(f"{name}={divisor} does not divide {of}={number}; right would be one of {right}")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer.

    sequence: tokens. vocabulary: 0 if embedding and head are of no interest. kv_heads: of keys and values, with
    grouped-query attention; 0 for as many as heads. ffn: the inner width of the MLP; 0 for four times the width. gated:
    SwiGLU, GEGLU: three matrices instead of two. dropout: after attention, after the MLP, and after the embedding.
    tied: the head has the matrix of the embedding. dtype: of activations. attention: "flash", which saves no sequence x
    sequence matrix, or "matrix".
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
    """How a model and its batch are split over GPUs.

    tp: GPUs that share a layer. pp: stages of the pipeline. dp: GPUs with a share of the batch. sp: sequence parallel,
    which splits over `tp` GPUs what tensor parallelism alone leaves whole. zero: the stage of ZeRO, 0 to 3: over `dp`
    GPUs 1 splits the optimizer's state, 2 gradients too, 3 weights too.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    zero: int = 0

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All that a projection needs.

    batch: the micro-batch, in sequences.
    tflops: what one GPU achieves, in 10^12 floating point operations a second. tflops_source: who says so.
    device_usd, drive_usd: the price of one; 0 if it is not known.
    head: count the embedding's dropout, the last norm and the head too; the paper counts the layers alone.
    """

    model: Model
    parallelism: Parallelism
    batch: int
    tflops: float
    device: Device
    drives: Drives
    device_usd: float = 0.0
    drive_usd: float = 0.0
    head: bool = True
    optimizer: str = "adam"
    tflops_source: str = "as given"

    def __post_init__(self) -> None:
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
