"""Train a small GPT-2 with the Trainer of Hugging Face, its saved activations on disk.

    pip install -c constraints.txt -e '.[trainers]'
    python examples/trainers/hf_trainer.py --dir /mnt/nvme

`TrainingArguments(torch_compile_backend=...)` takes only the names that Accelerate knows and raises a ValueError for
every other one, so the model is compiled before the Trainer gets it. `Module.compile` does that in place: what is
trained, saved and evaluated is the model itself, under its own names. Leave the Trainer's `torch_compile` off.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ssd_fx
from ssd_fx.integrations.hf import loss_only

LENGTH, VOCABULARY, BATCH = 64, 256, 4


def random_texts(count: int) -> list[dict[str, torch.Tensor]]:
    """Token numbers, int64 [LENGTH]; the model shifts the labels itself."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": text, "labels": text} for text in tokens]


def train(directory: str, steps: int) -> tuple[list[float], torch.nn.Module]:
    """The loss of every step, and the trained model."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY)
    model = GPT2LMHeadModel(config)
    # The two lines that are about us. The Trainer needs no logits, which would be an output of the compiled code else.
    loss_only(model)
    # The model is a toy: without "min_bytes" tensors below 1 MiB stay in memory.
    model.compile(backend="ssd_fx", options={"dirs": [directory], "min_bytes": "16KiB"})

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model, arguments, train_dataset=random_texts(2 * BATCH * steps))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory on the drive (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="default %(default)s")
    flags = parser.parse_args()
    losses, _ = train(flags.dir, flags.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n{ssd_fx.stats()}")


if __name__ == "__main__":
    main()
