"""Other people's models, tiny and with random weights: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 2, 64, 4, 96, 128
BATCH, LENGTH, IMAGE = 2, 32, 64


@dataclass(frozen=True)
class Case:
    """A model and the keyword arguments of its call; `loss` makes a scalar of what it returns."""

    model: nn.Module
    inputs: Mapping[str, Any]
    loss: Callable[[Any], Tensor]

    def on(self, device: str) -> Case:
        """The same on `device`."""
        inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        return Case(self.model.to(device), inputs, self.loss)


Builder = Callable[[float], Case]  # of a probability of dropout


def said(output: Any) -> Tensor:
    """The loss that the model computes itself."""
    loss: Tensor = output.loss
    return loss


def squared(output: Any) -> Tensor:
    """Of a model that computes none, the mean square of whatever it returns first."""
    tensor = output if isinstance(output, Tensor) else output[0]
    return tensor.float().square().mean()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (BATCH, LENGTH))


def pixels(size: int = IMAGE) -> Tensor:
    return torch.rand(BATCH, 3, size, size)


def configured(name: str, head: str, **more: Any) -> nn.Module:
    """A model of transformers with the names that nearly all configurations of language models share."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        **more,
    )
    model: nn.Module = getattr(transformers, f"{name}For{head}")(config)
    return model


def decoder(name: str, **more: Any) -> Builder:
    """A causal language model of transformers."""

    def build(dropout: float) -> Case:
        own = {"max_position_embeddings": LENGTH, "attention_dropout": dropout, "use_cache": False}
        own |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = configured(name, "CausalLM", **(own | more))
        ids = tokens()
        return Case(model, {"input_ids": ids, "labels": ids}, said)

    return build


def gpt2(dropout: float) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    ids = tokens()
    config = GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2, use_cache=False)
    return Case(GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, said)


def encoder(name: str, **more: Any) -> Builder:
    """A masked language model of transformers."""

    def build(dropout: float) -> Case:
        own = {"max_position_embeddings": 2 * LENGTH, "pad_token_id": 0}
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        model = configured(name, "MaskedLM", **own, **rates, **more)
        ids = tokens()
        mask = torch.ones_like(ids)
        mask[0, LENGTH // 2 :] = 0
        return Case(model, {"input_ids": ids, "attention_mask": mask, "labels": ids}, said)

    return build


def t5(dropout: float) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": INNER}
    sizes |= {"num_layers": LAYERS, "num_heads": HEADS, "decoder_start_token_id": 0}
    ids = tokens()
    config = T5Config(**sizes, dropout_rate=dropout, use_cache=False)
    return Case(T5ForConditionalGeneration(config), {"input_ids": ids, "labels": tokens()}, said)


def bart(dropout: float) -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    halves = {f"{half}_layers": LAYERS for half in ("encoder", "decoder")}
    halves |= {f"{half}_attention_heads": HEADS for half in ("encoder", "decoder")}
    halves |= {f"{half}_ffn_dim": INNER for half in ("encoder", "decoder")}
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 2 * LENGTH}
    config = BartConfig(**sizes, **halves, dropout=dropout, attention_dropout=dropout, use_cache=False)
    return Case(BartForConditionalGeneration(config), {"input_ids": tokens(), "labels": tokens()}, said)


def vision(name: str, **more: Any) -> Builder:
    """An image classifier of transformers."""

    def build(dropout: float) -> Case:
        import transformers

        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = getattr(transformers, f"{name}Config")(image_size=IMAGE, num_labels=4, **rates, **more)
        model = getattr(transformers, f"{name}ForImageClassification")(config)
        return Case(model, {"pixel_values": pixels(IMAGE), "labels": torch.tensor([0, 3])}, said)

    return build


def clip(dropout: float) -> Case:
    from transformers import CLIPConfig, CLIPModel

    shared = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    shared |= {"num_attention_heads": HEADS, "projection_dim": WIDTH}
    text = shared | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "attention_dropout": dropout}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    image = shared | {"image_size": IMAGE, "patch_size": 16, "attention_dropout": dropout}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=WIDTH))
    return Case(model, {"input_ids": tokens(), "pixel_values": pixels(), "return_loss": True}, said)


def whisper(dropout: float) -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    halves = {f"{half}_layers": LAYERS for half in ("encoder", "decoder")}
    halves |= {f"{half}_attention_heads": HEADS for half in ("encoder", "decoder")}
    halves |= {f"{half}_ffn_dim": INNER for half in ("encoder", "decoder")}
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_mel_bins": 16, "max_source_positions": LENGTH}
    sizes |= {"max_target_positions": LENGTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    special = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = WhisperConfig(**sizes, **halves, **special, dropout=dropout, attention_dropout=dropout, use_cache=False)
    sound = torch.randn(BATCH, 16, 2 * LENGTH)
    return Case(WhisperForConditionalGeneration(config), {"input_features": sound, "labels": tokens()}, said)


def mamba(dropout: float) -> Case:
    from transformers import MambaConfig, MambaForCausalLM

    del dropout  # it has none
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4}
    ids = tokens(BATCH, 8)  # its scan is a loop over the length, unrolled in the graph
    config = MambaConfig(**sizes, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return Case(MambaForCausalLM(config), {"input_ids": ids, "labels": ids}, said)


def image_model(name: str, size: int = IMAGE, **more: Any) -> Builder:
    """A model of timm."""

    def build(dropout: float) -> Case:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=4, drop_rate=dropout, **more)
        return Case(model, {"x": pixels(size)}, squared)

    return build


def mixer(dropout: float) -> Case:
    from timm.models.mlp_mixer import MlpMixer

    model = MlpMixer(4, IMAGE, patch_size=16, num_blocks=LAYERS, embed_dim=WIDTH, drop_rate=dropout)
    return Case(model, {"x": pixels()}, squared)


GROUPED = {"num_key_value_heads": 2}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
SMALL_VISION = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}

MODELS: dict[str, Builder] = {
    "GPT-2": gpt2,
    "GPT-NeoX": decoder("GPTNeoX"),
    "Llama": decoder("Llama", **GROUPED),
    "Mistral": decoder("Mistral", **GROUPED, sliding_window=16),
    "Qwen2": decoder("Qwen2", **GROUPED),
    "Qwen3": decoder("Qwen3", **GROUPED, head_dim=16),
    "Gemma": decoder("Gemma", **GROUPED, head_dim=16),
    "Gemma 2": decoder("Gemma2", **GROUPED, head_dim=16, sliding_window=16),
    "Phi": decoder("Phi"),
    "OLMo 2": decoder("Olmo2", **GROUPED),
    "Mixtral": decoder("Mixtral", **GROUPED, **EXPERTS),
    "BERT": encoder("Bert"),
    "RoBERTa": encoder("Roberta"),
    "ALBERT": encoder("Albert", embedding_size=32),
    "DeBERTa v2": encoder("DebertaV2", **DEBERTA),
    "ELECTRA": encoder("Electra", embedding_size=32),
    "T5": t5,
    "BART": bart,
    "ViT": vision("ViT", **SMALL_VISION, num_attention_heads=HEADS, patch_size=16),
    "DeiT": vision("DeiT", **SMALL_VISION, num_attention_heads=HEADS, patch_size=16),
    "Swin": vision("Swin", embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, patch_size=4),
    "CLIP": clip,
    "Whisper": whisper,
    "Mamba": mamba,
    "ResNet-18": image_model("resnet18"),
    "ConvNeXt": image_model("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    "EfficientNet": image_model("efficientnet_lite0"),
    "MobileNet v3": image_model("mobilenetv3_small_050"),
    "DenseNet": image_model("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "MLP-Mixer": mixer,
}
