"""Fine-tuning with TRL: its fused head works in pieces outside of the graph, so the decoder below it is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bitwise import Compile
from tests.loops.loops import assert_no_bit_changes
from tests.ways.test_transformers import llama, texts, transformers
from tests.ways.ways import installed

pytestmark = pytest.mark.slow
trl = installed("trl")
tokenizers = pytest.importorskip("tokenizers")


def tokenizer() -> Any:
    """Of 128 words, which are their numbers."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(128)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="1", eos_token="2", unk_token="0")


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_sft(tmp_path: Path, inner: str, adapted: bool) -> None:
    datasets = installed("datasets")
    peft = installed("peft")

    def loop(compile: Compile) -> list[Tensor]:
        model = llama()
        model.model.compile(**compile.keywords)  # type: ignore[attr-defined]
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=4, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, gradient_checkpointing=False, bf16=False,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model,
            arguments,
            train_dataset=datasets.Dataset.from_list([{"input_ids": text.tolist()} for text in texts(8)]),
            processing_class=tokenizer(),
            peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4) if adapted else None,
        )
        trainer.train()
        losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 2
        return [*losses, *(p.detach().clone() for p in trainer.model.parameters() if p.requires_grad)]

    assert_no_bit_changes(loop, tmp_path, inner, section="ways of working", plain=inner)
