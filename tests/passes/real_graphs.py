"""Joint graphs of small GPT, BERT and T5 models as training steps, for planners to solve."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from examples.train_gpt import GPT, Shape
from ssd_fx.passes.alias.storages import alias
from ssd_fx.passes.axis import Choice, Step
from ssd_fx.passes.cost.lifetime import lifetime
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.cost.roofline import time
from ssd_fx.passes.joint.recompute import price
from ssd_fx.passes.partition import Partition, activation_names, untrained_names
from ssd_fx.passes.plan import Plan
from ssd_fx.passes.planner.step import model as step_of
from tests.passes.planner.instances import LANES, Instance

Model = tuple[nn.Module, Callable[[Any], Any]]  # the model, and how it is run
SPEEDS = LANES | {"half": (2.0, 2.0), "quarter": (4.0, 4.0), "tenth": (10.0, 10.0)}
SMALLEST = 1 / 1000  # groups below that share of the saved bytes stay: they decide nothing and make the program large


def gpt(layers: int = 2) -> Model:
    """Layers of the example's GPT with dropout, the loss included."""
    shape = Shape(layers=layers, width=128, heads=4, seq=128, dropout=0.1)
    tokens = torch.zeros(4, shape.seq, dtype=torch.long)
    return GPT(shape), lambda model: model(tokens, tokens)


def bert() -> Model:
    """Two layers of BERT with a masked-language head. Needs transformers."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    tokens = torch.zeros(4, 128, dtype=torch.long)
    return BertForMaskedLM(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def t5() -> Model:
    """Two encoder and two decoder layers of T5, the loss included. Needs transformers."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=1000, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    tokens = torch.zeros(4, 64, dtype=torch.long)
    return T5ForConditionalGeneration(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def vit() -> Model:
    """Two layers of a vision transformer with a classifier. Needs transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, image_size=64, patch_size=8
    )
    labels = torch.zeros(8, dtype=torch.long)
    images = torch.zeros(8, 3, 64, 64)
    return ViTForImageClassification(config), lambda model: model(pixel_values=images, labels=labels).loss


MODELS = {"gpt": gpt, "gpt12": partial(gpt, layers=12), "bert": bert, "t5": t5, "vit": vit}


def missing(name: str) -> str:
    """Why the model cannot be built here, or nothing."""
    needs = name in ("bert", "t5", "vit") and importlib.util.find_spec("transformers") is None
    return "transformers is not installed" if needs else ""


def instance(name: str, speed: str, *, recompute: bool = False) -> Instance:
    """The model's step on a machine whose lanes need about that many seconds per second of compute beside them.

    `recompute`: what can be computed again may be.
    """
    step = _step(*MODELS[name](), recompute)
    total = sum(item.nbytes for item in step.items)
    before, behind = sum(step.seconds[: step.forward]), sum(step.seconds[step.forward :])
    lane = sum(SPEEDS[speed]) / 2
    write_bw, read_bw = total / (before * lane), total / (behind * lane)
    latency_s = (before + behind) / 1000
    machine = replace(_machine(), write_bw=write_bw, read_bw=read_bw, latency_s=latency_s)
    return Instance(f"{name}-{speed}", step, machine)


def _machine() -> Machine:
    return Machine.default(torch.device("cpu"), 2)


def _step(model: nn.Module, run: Callable[[Any], Any], recompute: bool) -> Step:
    """The step of the one graph that `run` compiles."""
    found: list[Step] = []

    def partition(gm: fx.GraphModule, inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        activations = activation_names(gm, kwargs.get("static_lifetime_input_indices"))
        forward, backward = min_cut_rematerialization_partition(gm, inputs, **kwargs)
        made = Partition(forward, backward, kwargs["num_fwd_outputs"], activations, untrained_names(gm))
        found.append(_modelled(made, recompute))
        return forward, backward

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=partition, decompositions=select_decomp_table()
    )
    run(torch.compile(model.train(), backend=backend, fullgraph=True))
    torch._dynamo.reset()
    (step,) = found
    return step


def _as_it_is(gm: fx.GraphModule, inputs: Sequence[object]) -> Any:
    return make_boxed_func(gm.forward)


def _modelled(partition: Partition, recompute: bool) -> Step:
    plan = Plan("graph")
    for decide in (alias, partial(time, machine=_machine()), lifetime, *([price] if recompute else [])):
        plan = decide(partition, plan)
    smallest = SMALLEST * plan.saved_bytes
    choices = {}
    for group in plan.groups:
        allowed = {Choice.KEEP}
        if not group.obstacle and group.nbytes >= smallest:
            allowed |= {Choice.OFFLOAD, Choice.RECOMPUTE} if group.slot in plan.prices else {Choice.OFFLOAD}
        choices[group.slot] = frozenset(allowed)
    return step_of(partition, plan, choices)
