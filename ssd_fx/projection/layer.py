"""Bytes and floating point operations of a layer and of the head, on one GPU. docs/projection.md, sections 1 and 2."""

from __future__ import annotations

from ssd_fx.projection.scenario import Model, Parallelism


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
