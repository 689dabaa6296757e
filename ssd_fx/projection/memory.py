"""What must stay on the GPU, and the largest micro-batch that fits. docs/projection.md, section 4."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.projection.layer import input_bytes, layer_bytes, layer_weights, outside_bytes
from ssd_fx.projection.scenario import Scenario

LAYERS_IN_MEMORY = 2  # one that computes, and one that is being written or read (arXiv 2408.10013)
_STATE = {  # bytes a parameter has in optimizer state, gradient and weight
    ("sgd", 2): (0, 2, 2),
    ("sgd", 4): (0, 4, 4),
    ("adam", 2): (12, 2, 2),  # master copy and two moments in 32 bits (Rajbhandari et al. 2020, arXiv 1910.02054)
    ("adam", 4): (8, 4, 4),
}


@dataclass(frozen=True, kw_only=True)
class Memory:
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


def memory(scenario: Scenario, share: float = 1.0) -> Memory:
    """The memory of the GPU that needs the most. share: the part of the activations that drives keep up with."""
    state, room = state_bytes(scenario), scenario.device.memory_gib * 2**30
    kept, offloaded = kept_bytes(scenario, 1), offloaded_bytes(scenario, 1, share)
    recomputed = recomputed_bytes(scenario, 1)
    fits = max(0, int((room - state) / offloaded))
    largest = min(fits, int(scenario.drives.nbytes / (share * kept)))
    return Memory(
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
