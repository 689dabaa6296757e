"""The formulas: what a scenario writes, how fast, what stays in memory, how long drives last. docs/projection.md has
the sources, in the order in which they stand here; no model runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from projection.scenario import Model, Parallelism, Scenario
from ssd_fx.hardware import Drive, Drives
from ssd_fx.runtime.wear import DAY_S, rated_days

LAYERS_IN_MEMORY = 2  # one that computes, and one that is being written or read (arXiv 2408.10013)
PAPER_WAF = 2.5  # write amplification in the workload that TBW is rated for; large sequential writes have about 1
PAPER_RETENTION = 86.0  # more cycles if data need to last for 1 day only, instead of 3 years
Hides = Literal["forward", "half", "no"]
_STATE = {  # bytes a parameter has in optimizer state, gradient and weight
    ("sgd", 2): (0, 2, 2),
    ("sgd", 4): (0, 4, 4),
    ("adam", 2): (12, 2, 2),  # master copy and two moments in 32 bits (Rajbhandari et al. 2020, arXiv 1910.02054)
    ("adam", 4): (8, 4, 4),
}


def layer_bytes(model: Model, split: Parallelism, batch: int) -> float:
    """What one layer saves for the backward.

    Of GPT in 16 bits with flash attention this is s*b*h*(10 + 24/t), and 34*s*b*h/t with sequence parallelism
    (Korthikanti et al. 2022, arXiv 2205.05198, section 4, without the matrices of attention).
    """
    e, h, tp = model.element_bytes, model.width, split.tp
    whole = e * 4 * h + (2 * h if model.dropout else 0)  # inputs of both norms, of qkv and of the MLP; two masks
    keys = 2 * model.kv_width * max(1.0, tp / (model.kv_heads or model.heads))  # with few heads GPUs have copies
    parts = e * (2 * h + keys + (3 if model.gated else 2) * model.inner)  # queries, output, keys and values, MLP
    if model.attention == "matrix":
        parts += model.heads * model.sequence * (2 * e + 1 if model.dropout else e)  # softmax; its dropout and mask
    return model.sequence * batch * (whole / (tp if split.sp else 1) + parts / tp)


def input_bytes(model: Model, split: Parallelism, batch: int) -> float:
    """What a layer saves if it is computed again in the backward: its input (Korthikanti et al. 2022, section 5)."""
    return model.sequence * batch * model.element_bytes * model.width / (split.tp if split.sp else 1)


def outside_bytes(model: Model, split: Parallelism, batch: int) -> float:
    """What is saved outside the layers: a mask of dropout, the inputs of the last norm and of the head, the logits.

    Korthikanti et al. 2022, section 4; they keep logits in 32 bits, and we count them in the dtype of the
    activations, because compiled graphs save them so.
    """
    if not model.vocabulary:
        return 0.0
    e, h, tp = model.element_bytes, model.width, split.tp
    whole = e * 2 * h + (h if model.dropout else 0)
    return model.sequence * batch * (whole / (tp if split.sp else 1) + e * model.vocabulary / tp)


def layer_flops(model: Model, batch: int) -> float:
    """Of the forward of one layer, on all GPUs together: 24*s*b*h^2 + 4*s^2*b*h of GPT.

    A product of m x k and k x n counts 2mkn. Causal attention counts in full, as in published rates
    (Narayanan et al. 2021, arXiv 2104.04473, appendix).
    """
    tokens = model.sequence * batch
    return 2 * tokens * layer_weights(model) + 4 * tokens * model.sequence * model.width


def head_flops(model: Model, batch: int) -> float:
    """Of the forward of the head, on all GPUs together."""
    return 2.0 * model.sequence * batch * model.width * model.vocabulary


def layer_weights(model: Model) -> int:
    """Elements of the matrices of one layer. Biases and norms are left out: 13h of 12h^2 + 13h in GPT."""
    attention = model.width * (2 * model.width + 2 * model.kv_width)
    return attention + model.width * model.inner * (3 if model.gated else 2)


def parameters(model: Model) -> int:
    """Of the whole model, without biases and norms."""
    return model.layers * layer_weights(model) + model.vocabulary * model.width * (1 if model.tied else 2)


@dataclass(frozen=True, kw_only=True)
class StepIO:
    """What one GPU writes in the step of one micro-batch, and reads again.

    nbytes: activations. forward_s, step_s: seconds of the forward, and of forward and backward.
    """

    nbytes: float
    forward_s: float
    step_s: float

    @property
    def write_bytes_s(self) -> float:
        """To write all within half the step, as the paper counts (arXiv 2408.10013)."""
        return self.nbytes / (self.step_s / 2)

    @property
    def forward_write_bytes_s(self) -> float:
        """To write all within the forward."""
        return self.nbytes / self.forward_s

    @property
    def read_bytes_s(self) -> float:
        """To read all within the backward."""
        return self.nbytes / (self.step_s - self.forward_s)

    @property
    def bytes_per_day(self) -> float:
        return self.nbytes / self.step_s * DAY_S

    def hides(self, drives: Drives) -> Hides:
        """Where the writes hide: within the forward, or half the step. "no": not, or reads are too slow."""
        if self.share(drives) < 1:
            return "no"
        if drives.write_bytes_s >= self.forward_write_bytes_s:
            return "forward"
        return "half"

    def drives_needed(self, drive: Drive) -> tuple[int, int]:
        """How many drives take the writes within half the step, and within the forward, and give back in time."""
        read = self.read_bytes_s / (drive.read_gbps * 1e9)
        rates = (self.write_bytes_s, self.forward_write_bytes_s)
        half, forward = (math.ceil(max(rate / (drive.write_gbps * 1e9), read)) for rate in rates)
        return half, forward

    def share(self, drives: Drives) -> float:
        """The part of the activations that drives take within half the step, and give back within the backward.

        Half a step reaches into the backward. Drives are taken to write and read at their full rates at once there.
        """
        return min(1.0, drives.write_bytes_s / self.write_bytes_s, drives.read_bytes_s / self.read_bytes_s)


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Bytes on one GPU, and the micro-batches that fit; 0 if not even one sequence does.

    state_bytes: weights, gradients, optimizer.
    kept_bytes: activations if all are kept. offloaded_bytes: if two layers, the head, and what drives are too slow for
    are in memory. recomputed_bytes: if every layer keeps its input and is computed again in the backward.
    largest_drive_bytes: activations on the drives with the largest micro-batch. drives_are_full: they have no room for
    more; else the GPU has none.
    """

    state_bytes: float
    kept_bytes: float
    offloaded_bytes: float
    recomputed_bytes: float
    largest_batch_kept: int
    largest_batch_offloaded: int
    largest_batch_recomputed: int
    largest_drive_bytes: float
    drives_are_full: bool


def memory(scenario: Scenario, share: float = 1.0) -> GpuMemory:
    """The memory of the GPU that needs the most. share: the part of the activations that drives keep up with."""
    state, room = state_bytes(scenario), scenario.device.memory_gib * 2**30
    kept, offloaded = kept_bytes(scenario, 1), offloaded_bytes(scenario, 1, share)
    recomputed = recomputed_bytes(scenario, 1)
    fits = max(0, int((room - state) / offloaded))
    largest = min(fits, int(drives_bytes(scenario.drives) / (share * kept)))
    return GpuMemory(
        state_bytes=state,
        kept_bytes=kept * scenario.batch,
        offloaded_bytes=offloaded * scenario.batch,
        recomputed_bytes=recomputed * scenario.batch,
        largest_batch_kept=max(0, int((room - state) / kept)),
        largest_batch_offloaded=largest,
        largest_batch_recomputed=max(0, int((room - state) / recomputed)),
        largest_drive_bytes=share * kept * largest,
        drives_are_full=largest < fits,
    )


def drives_bytes(drives: Drives) -> float:
    """What drives hold."""
    return drives.count * drives.drive.capacity_tb * 1e12


def state_bytes(scenario: Scenario) -> float:
    """Weights, gradients and optimizer state of a pipeline stage that has the embedding, or the head."""
    model, split = scenario.model, scenario.parallelism
    matrices = 2 if split.pp == 1 and not model.tied else 1  # embedding and head
    own = scenario.layers_per_gpu * layer_weights(model) + matrices * model.vocabulary * model.width
    parts = _STATE[scenario.optimizer, model.element_bytes]
    split_from = enumerate(parts, start=1)  # ZeRO's stage 1 splits the optimizer's state, 2 gradients, 3 weights
    return own / split.tp * sum(n / (split.dp if split.zero >= stage else 1) for stage, n in split_from)


def kept_bytes(scenario: Scenario, batch: int) -> float:
    """Activations of all layers. The first of `pp` stages holds `pp` micro-batches (1F1B), the last has the head."""
    return _staged(scenario, scenario.layers_per_gpu * layer_bytes(scenario.model, scenario.parallelism, batch), batch)


def recomputed_bytes(scenario: Scenario, batch: int) -> float:
    """The inputs of all layers, and the activations of the one layer that is computed again."""
    model, split = scenario.model, scenario.parallelism
    inputs = _staged(scenario, scenario.layers_per_gpu * input_bytes(model, split, batch), batch)
    return inputs + layer_bytes(model, split, batch)


def _staged(scenario: Scenario, layers: float, batch: int) -> float:
    """Of the stage that needs the most, where a micro-batch has `layers` bytes in the layers of a stage."""
    return max(scenario.parallelism.pp * layers, layers + _head(scenario, batch))


def offloaded_bytes(scenario: Scenario, batch: int, share: float = 1.0) -> float:
    """Activations that are in memory at a time when `share` of all is offloaded."""
    layers = min(LAYERS_IN_MEMORY, scenario.layers_per_gpu)
    passing = layers * layer_bytes(scenario.model, scenario.parallelism, batch) + _head(scenario, batch)
    return passing + (1 - share) * (kept_bytes(scenario, batch) - passing)


def _head(scenario: Scenario, batch: int) -> float:
    return outside_bytes(scenario.model, scenario.parallelism, batch) if scenario.head else 0.0


@dataclass(frozen=True, kw_only=True)
class Endurance:
    """Life in days and cost in US dollars, of the drives of one GPU. Costs are 0 where the price is not known.

    bytes_per_day: of what the drives keep up with. rated_days: until the rated TBW is written.
    paper_waf_days: with the paper's write amplification. paper_days: with its retention as well.
    wear_usd_per_day: of the price of the drives, by rated TBW.
    """

    bytes_per_day: float
    rated_days: float
    paper_waf_days: float
    paper_days: float
    drives_usd: float
    wear_usd_per_day: float


def endurance(traffic: StepIO, drives: Drives, drive_usd: float = 0.0) -> Endurance:
    """The life of `drives` that get `traffic` day and night, or the share of it that they keep up with.

    drive_usd: the price of one.
    """
    bytes_per_day = traffic.bytes_per_day * traffic.share(drives)
    days = rated_days(drives.rated_tb, bytes_per_day / DAY_S)
    price = drives.count * drive_usd
    return Endurance(
        bytes_per_day=bytes_per_day,
        rated_days=days,
        paper_waf_days=days * PAPER_WAF,
        paper_days=days * PAPER_WAF * PAPER_RETENTION,
        drives_usd=price,
        wear_usd_per_day=price / days,
    )


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What one GPU writes for one micro-batch, and what follows.

    layer_bytes: activations of one layer. layer_bytes_per_sbh: the same per sequence, batch and width.
    outside_bytes: activations outside the layers; 0 where they are not counted.
    recomputed_step_s: forward and backward if every layer is computed again in the backward.
    hides: where the writes hide. share: the part of the activations that drives keep up with.
    """

    scenario: Scenario
    parameters: int
    layer_bytes: float
    layer_bytes_per_sbh: float
    outside_bytes: float
    traffic: StepIO
    recomputed_step_s: float
    hides: Hides
    share: float
    memory: GpuMemory
    endurance: Endurance


def project(scenario: Scenario) -> Projection:
    """The projection, of the last pipeline stage where the head counts."""
    model, split, batch = scenario.model, scenario.parallelism, scenario.batch
    layer = layer_bytes(model, split, batch)
    outside = outside_bytes(model, split, batch) if scenario.head else 0.0
    rate = split.tp * scenario.tflops * 1e12
    layers_s = scenario.layers_per_gpu * layer_flops(model, batch) / rate
    forward_s = layers_s + (head_flops(model, batch) / rate if scenario.head else 0.0)
    nbytes = scenario.layers_per_gpu * layer + outside
    traffic = StepIO(nbytes=nbytes, forward_s=forward_s, step_s=3 * forward_s)
    share = traffic.share(scenario.drives)
    return Projection(
        scenario=scenario,
        parameters=parameters(model),
        layer_bytes=layer,
        layer_bytes_per_sbh=layer / (model.sequence * batch * model.width),
        outside_bytes=outside,
        traffic=traffic,
        recomputed_step_s=traffic.step_s + layers_s,
        hides=traffic.hides(scenario.drives),
        share=share,
        memory=memory(scenario, share),
        endurance=endurance(traffic, scenario.drives, scenario.drive_usd),
    )
