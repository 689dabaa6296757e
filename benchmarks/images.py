"""Two models of images: a vision transformer that names them, and a UNet that removes noise from them.

As those of families.py they return their loss and are written for what they cost. Their layers are the elements of
every ModuleList, and each gets what the one before has returned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from families import Layer, train_gpt  # a neighbour of this file
from torch import Tensor, nn

CLASSES = 1000
PATCH, CHANNELS = 16, 3  # of the vision transformer's images
NOISE = 4  # channels of what the UNet reads and predicts, as in latent diffusion
GROUPS = 32  # of its norms


class ViT(nn.Module):
    """The encoder layers of BERT on `shape.seq` patches, and a head on their mean."""

    def __init__(self, shape: train_gpt.Shape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, shape.width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.empty(shape.seq, shape.width))
        self.blocks = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, CLASSES)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """`images`: [batch, 3, height, width]; `targets`: int64 [batch]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), targets)


class Residual(nn.Module):
    """Two convolutions, each behind a norm. The sum with the input is the result."""

    def __init__(self, of: int, to: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, of), nn.Conv2d(of, to, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, to), nn.Conv2d(to, to, 3, padding=1)
        self.skip = nn.Conv2d(of, to, 1) if of != to else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        out: Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        return out


class Level(nn.Module):
    """`layers` on the way down, what is `within` at half the size and twice the channels, and `layers` on the way up.

    The way up begins with what the way down has ended with, beside the result of what is within.
    """

    def __init__(self, width: int, layers: int, within: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Residual(width, width) for _ in range(layers))
        self.smaller = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1) if within else None
        self.within = Level(2 * width, layers, within - 1) if within else None
        self.larger = nn.Conv2d(2 * width, width, 3, padding=1) if within else None
        self.up = nn.ModuleList(Residual((1 if i or not within else 2) * width, width) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.down:
            x = layer(x)
        if self.smaller is not None and self.within is not None and self.larger is not None:
            y = F.interpolate(self.within(self.smaller(x)), scale_factor=2.0)
            x = torch.cat((x, self.larger(y)), dim=1)
        for layer in self.up:
            x = layer(x)
        return x


class UNet(nn.Module):
    """Three levels. `layers` are those of each of the six ways."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(NOISE, width, 3, padding=1), nn.Conv2d(width, NOISE, 3, padding=1)
        self.levels = Level(width, layers, 2)
        self.norm = nn.GroupNorm(GROUPS, width)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Both: [batch, 4, height, width], of sizes that can be halved twice."""
        x = self.levels(self.first(images))
        return F.mse_loss(self.last(F.silu(self.norm(x))), targets)
