"""Train a small network with Lightning, its saved activations on disk.

    pip install -c constraints.txt -e '.[trainers]'
    python examples/trainers/with_lightning.py --dir /mnt/nvme

Lightning takes a module that `torch.compile` returned, whatever the backend, and runs its `training_step` compiled. The
file is not called lightning.py because Python would then import it in the library's place.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ssd_fx

WIDTH, BATCH = 256, 256


class Autoencoder(lightning.LightningModule):  # type: ignore[misc]  # the library is not there when this is checked
    """Four linear layers with dropout between them; `losses` collects those of all steps."""

    def __init__(self) -> None:
        super().__init__()
        inner = [[nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)] for _ in range(3)]
        self.layers = nn.Sequential(*(module for block in inner for module in block), nn.Linear(WIDTH, WIDTH))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        loss: torch.Tensor = (self.layers(x) - x).square().mean()
        return loss

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], batch: list[torch.Tensor], batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(directory: str, steps: int) -> tuple[list[float], nn.Module]:
    """The loss of every step, and the trained model."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(steps * BATCH, WIDTH)), batch_size=BATCH)
    model = Autoencoder()
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    options: dict[str, Any] = {"dirs": [directory], "min_bytes": "16KiB"}  # tensors below 1 MiB stay without it
    trainer.fit(torch.compile(model, backend="ssd_fx", options=options), loader)
    return [loss.item() for loss in model.losses], model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory on the drive (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="default %(default)s")
    flags = parser.parse_args()
    losses, _ = train(flags.dir, flags.steps)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n{ssd_fx.stats()}")


if __name__ == "__main__":
    main()
