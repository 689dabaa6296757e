"""Train a small transformer with Accelerate: accumulated gradients, bfloat16, its saved activations on disk.

    pip install -c constraints.txt -e '.[trainers]'
    python examples/trainers/with_accelerate.py --dir /mnt/nvme

`Accelerator(dynamo_backend=...)` takes only the names in its `DynamoBackend` and raises a ValueError for every other
one, so the model is compiled before it is prepared, and Accelerate's own compilation stays off. The file is not called
accelerate.py because Python would then import it in the library's place.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ssd_fx

LENGTH, WIDTH, VOCABULARY, BATCH, ACCUMULATE = 64, 128, 256, 4, 2


class Classifier(nn.Module):
    """Two layers of a transformer over random tokens; returns the loss, so that one graph holds it all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(self.embedding(tokens)).mean(1)), targets)


def train(directory: str, steps: int) -> tuple[list[float], nn.Module]:
    """The loss of every micro-batch, and the trained model."""
    torch.manual_seed(0)
    count = steps * ACCUMULATE * BATCH
    data = TensorDataset(torch.randint(VOCABULARY, (count, LENGTH)), torch.randint(VOCABULARY, (count,)))
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The one line that is about us. The model is a toy: without "min_bytes" tensors below 1 MiB stay in memory.
    model.compile(backend="ssd_fx", options={"dirs": [directory], "min_bytes": "16KiB"})

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE, mixed_precision="bf16"
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))
    losses = []
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = model(tokens, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.unwrap_model(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory on the drive (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="default %(default)s")
    flags = parser.parse_args()
    losses, _ = train(flags.dir, flags.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n{ssd_fx.stats()}")


if __name__ == "__main__":
    main()
