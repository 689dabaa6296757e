"""The Trainer of Hugging Face without logits in its graph, and experts as grouped products."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ssd_fx
from ssd_fx.report.report import Report
from ssd_fx.report.unfreed import unfreed
from tests.bitwise import Compile, assert_same_bits, deterministic
from tests.loops.loops import Loop, assert_no_bit_changes, gradients, seen_in_steps
from tests.ways.ways import installed

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 64, "vocab_size": 128, "use_cache": False}


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()


def texts(count: int = 4, length: int = 32) -> Tensor:
    """Token numbers, int64 [count, length]."""
    return torch.randint(128, (count, length), generator=torch.Generator().manual_seed(1))


def outputs_of(report: Report) -> list[str]:
    """Saved tensors that stay because the compiled code returns them."""
    return [each.row.place for each in unfreed(report) if each.row.shared == "output"]


def steps(model: nn.Module, directory: Path, inner: str) -> list[Tensor]:
    """Three losses, the last gradients."""
    torch._dynamo.reset()
    ssd_fx.reset_stats()
    model.compile(backend="ssd_fx", options={"dirs": [str(directory)], "inner": inner, "budget": 0, "min_bytes": 0})
    losses = []
    for _ in range(3):
        outputs = model(input_ids=texts(), labels=texts())
        assert (outputs.logits is None) == ("forward" in vars(model))
        losses.append(outputs.loss)
        del outputs  # as the Trainer does
        losses[-1].backward()
    return [*losses, *gradients(model)]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_logits_are_an_output_no_more(tmp_path: Path, inner: str) -> None:
    """Without it the report names them under Inductor, and nobody can let go of them inside the Trainer."""
    from ssd_fx.integrations.hf import loss_only

    with deterministic():
        expected = steps(llama(), tmp_path, inner)
        named = outputs_of(ssd_fx.report())
        model = llama()
        loss_only(model)
        assert_same_bits(steps(model, tmp_path, inner), expected)
    assert ["lm_head" in place for place in named] == ([True] if inner == "inductor" else [])
    assert outputs_of(ssd_fx.report()) == []
    model.eval()
    assert model(input_ids=texts(), labels=texts()).logits is not None
    model.train()
    assert model(input_ids=texts()).logits is not None
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(llama().forward).parameters)


def test_a_copy_calls_its_own_parameters() -> None:
    from ssd_fx.integrations.hf import loss_only

    model = llama()
    loss_only(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    assert copied(input_ids=texts(), labels=texts()).loss != model(input_ids=texts(), labels=texts()).loss


def test_a_forward_that_a_hook_has_replaced() -> None:
    """As accelerate's hooks do, which from_pretrained(device_map=...) adds."""
    from ssd_fx.integrations.hf import loss_only

    model = llama()
    model.forward = functools.partial(model.forward)
    right = r"forward of LlamaForCausalLM is a partial.*; right would be .*accelerate\.hooks\.remove_hook_from_module"
    with pytest.raises(ValueError, match=right):
        loss_only(model)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_trainer_without_logits(tmp_path: Path, inner: str) -> None:
    installed("accelerate")
    from ssd_fx.integrations.hf import loss_only

    def loop(compile: Compile) -> list[Tensor]:
        model = llama()
        loss_only(model)
        model.compile(**compile.keywords)  # type: ignore[attr-defined]
        data = [{"input_ids": text, "labels": text} for text in texts(12)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1, eval_steps=2,
            eval_strategy="steps", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
        trainer.train()
        history = trainer.state.log_history
        found = [torch.tensor(entry[key]) for entry in history for key in ("loss", "eval_loss") if key in entry]
        assert len(found) == 5  # the last step is evaluated too
        return [*found, *(p.detach().clone() for p in model.parameters())]

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner)


def experts(how: str) -> Loop:
    """A Mixtral, whose tokens go to two of four experts."""

    def loop(compile: Compile) -> list[Tensor]:
        torch.manual_seed(0)
        config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
        model = transformers.MixtralForCausalLM._from_config(config, experts_implementation=how).train()
        compiled = compile(model)
        return seen_in_steps(model, lambda _: compiled(input_ids=texts(), labels=texts()).loss)

    return loop


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_experts_as_grouped_products(tmp_path: Path, inner: str) -> None:
    assert_no_bit_changes(experts("grouped_mm"), tmp_path, inner, section="ways of working", plain=inner, share=0.95)


@pytest.mark.slow
def test_experts_one_after_the_other(tmp_path: Path) -> None:
    """How many tokens an expert gets is known when it runs, so what is as large as that stays in memory."""
    loop = experts("eager")
    stats = assert_no_bit_changes(loop, tmp_path, section="ways of working", plain="aot_eager", share=0.3)
    assert stats.offloaded_bytes < 0.8 * stats.saved_bytes
