"""The projection of a scenario: everything put together."""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.projection.endurance import Endurance, endurance
from ssd_fx.projection.layer import head_flops, layer_bytes, layer_flops, outside_bytes, parameters
from ssd_fx.projection.memory import Memory, memory
from ssd_fx.projection.scenario import Scenario
from ssd_fx.projection.traffic import Hides, Traffic


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
    traffic: Traffic
    recomputed_step_s: float
    hides: Hides
    share: float
    memory: Memory
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
    traffic = Traffic(nbytes=nbytes, forward_s=forward_s, step_s=3 * forward_s)
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
        endurance=endurance(traffic, scenario.drives),
    )
