"""Small models of many kinds, each of which ends in a loss: what a stranger might train. Nothing was tuned to them
before they were first measured (docs/results/peaks.md).

Two or three layers of width 256 each, and some MiB of what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# What has the parameters, the forward of a step, and its inputs.
Made = tuple[nn.Module, Callable[..., Tensor], Sequence[Tensor]]
WIDTH, HEADS, BATCH, LENGTH, CLASSES = 256, 4, 8, 256, 1000
Linear = Callable[[int, int], nn.Module]


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH)


def mlp(width: int = WIDTH, inner: int = 4 * WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


# ---- transformers


class Attention(nn.Module):
    """By PyTorch's function, with a mask of numbers, or spelled out with a softmax in float32 and dropout."""

    def __init__(self, linear: Linear = nn.Linear, kind: str = "fused") -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.kind = kind

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        parts = ((self.query, x), (self.key, context), (self.value, context))
        q, k, v = (linear(of).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear, of in parts)
        if self.kind == "spelled out":
            scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
            y = F.dropout(scores.float().softmax(-1), 0.1).to(v.dtype) @ v
        elif self.kind == "masked":
            later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            y = F.scaled_dot_product_attention(q, k, v, torch.zeros(later.shape).masked_fill(later, float("-inf")))
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(
        self, linear: Linear = nn.Linear, kind: str = "fused", norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.norm, self.mlp_norm = norm(WIDTH), norm(WIDTH)
        self.attention = Attention(linear, kind)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class LowRank(nn.Module):
    """A frozen weight and two small ones that are trained beside it (LoRA)."""

    def __init__(self, of: int, to: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(of, to).requires_grad_(False)
        self.down, self.up = nn.Linear(of, rank, bias=False), nn.Linear(rank, to, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return out


class RMSNorm(nn.Module):
    """In float32, whatever its input is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def blocks(linear: Linear = nn.Linear, kind: str = "fused") -> Made:
    model = nn.Sequential(Block(linear, kind), Block(linear, kind))
    return model, lambda x: mean_square(model(x)), (tokens(),)


def half_precision() -> Made:
    model = nn.Sequential(Block(norm=RMSNorm), Block(norm=RMSNorm)).bfloat16()
    return model, lambda x: mean_square(model(x).float()), (tokens().bfloat16(),)


def teacher() -> Made:
    """Distillation: what a frozen model says is the target."""
    frozen = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, CLASSES))
    model = nn.Sequential(Block(), nn.Linear(WIDTH, CLASSES))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = frozen(x).softmax(-1)
        return F.kl_div(model(x).log_softmax(-1), target, reduction="batchmean")

    return model, run, (tokens(),)


def encoder_decoder() -> Made:
    encoder = nn.Sequential(Block(), Block())
    decoder, crossing = (nn.ModuleList(of() for _ in range(3)) for of in (Block, Attention))

    def run(x: Tensor, y: Tensor) -> Tensor:
        context = encoder(x)
        for block, cross in zip(decoder, crossing, strict=True):
            y = block(y + cross(y, context))
        return mean_square(y)

    return nn.ModuleList([encoder, decoder, crossing]), run, (tokens(), tokens(length=LENGTH // 2))


def modules_of_torch() -> Made:
    encoder, decoder = (
        of(WIDTH, HEADS, 4 * WIDTH, batch_first=True) for of in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    inputs = (tokens(), tokens(length=LENGTH // 2))
    return nn.ModuleList([encoder, decoder]), lambda x, y: mean_square(decoder(y, encoder(x))), inputs


def modulated() -> Made:
    """As in diffusion transformers: a condition scales and shifts what each layer reads and returns."""
    layers, conditions = [Block(), Block()], nn.ModuleList(nn.Linear(WIDTH, 6 * WIDTH) for _ in range(2))

    def normed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift

    def run(x: Tensor, condition: Tensor, noise: Tensor) -> Tensor:
        for block, linear in zip(layers, conditions, strict=True):
            scale, shift, gate, mlp_scale, mlp_shift, mlp_gate = linear(F.silu(condition))[:, None].chunk(6, -1)
            x = x + gate * block.attention(normed(x, scale, shift))
            x = x + mlp_gate * block.down(F.gelu(block.up(normed(x, mlp_scale, mlp_shift)), approximate="tanh"))
        return F.mse_loss(x, noise)

    return nn.ModuleList([*layers, conditions]), run, (tokens(), torch.randn(BATCH, WIDTH), tokens())


def checkpointed() -> Made:
    model = nn.ModuleList(Block() for _ in range(3))

    def run(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return mean_square(x)

    return model, run, (tokens(),)


def several_heads() -> Made:
    trunk, heads = nn.Sequential(Block(), Block()), nn.ModuleList(nn.Linear(WIDTH, n) for n in (10, 100, CLASSES))

    def run(x: Tensor, y: Tensor) -> Tensor:
        found = trunk(x).flatten(0, 1)
        return torch.stack([F.cross_entropy(head(found), y) for head in heads]).sum()

    return nn.ModuleList([trunk, heads]), run, (tokens(), torch.randint(0, 10, (BATCH * LENGTH,)))


def loss_in_pieces() -> Made:
    body, head = Block(), nn.Linear(WIDTH, 4096, bias=False)

    def run(x: Tensor, y: Tensor) -> Tensor:
        pieces = zip(body(x).flatten(0, 1).chunk(8), y.chunk(8), strict=True)
        return torch.stack([F.cross_entropy(head(piece), of, reduction="sum") for piece, of in pieces]).sum() / len(y)

    return nn.ModuleList([body, head]), run, (tokens(4), torch.randint(0, 4096, (4 * LENGTH,)))


def tied_head() -> Made:
    embedding, body = nn.Embedding(4096, WIDTH), nn.Sequential(Block(), Block())

    def run(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy((body(embedding(x)) @ embedding.weight.t()).flatten(0, 1), y)

    inputs = (torch.randint(0, 4096, (4, LENGTH)), torch.randint(0, 4096, (4 * LENGTH,)))
    return nn.ModuleList([embedding, body]), run, inputs


def two_towers() -> Made:
    """Contrastive: each pair of a batch against all others."""
    model = nn.ModuleList(nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def run(x: Tensor, y: Tensor) -> Tensor:
        a, b = (F.normalize(tower(of).mean(1), dim=-1) for tower, of in zip(model, (x, y), strict=True))
        scores, target = 10 * a @ b.t(), torch.arange(len(a))
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2

    return model, run, (tokens(32, 64), tokens(32, 64))


def three_of_one() -> Made:
    """A triplet loss: one model three times."""
    model = nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH // 2))

    def run(*inputs: Tensor) -> Tensor:
        return F.triplet_margin_loss(*(model(x).mean(1) for x in inputs))

    return model, run, [tokens(4) for _ in range(3)]


def mixer() -> Made:
    """An MLP over the places, and one over the channels."""
    model: Any = nn.ModuleList(
        nn.ModuleList([nn.LayerNorm(WIDTH), mlp(196, 384), nn.LayerNorm(WIDTH), mlp()]) for _ in range(2)
    )

    def run(x: Tensor) -> Tensor:
        for norm, places, channel_norm, channels in model:
            x = x + places(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(channel_norm(x))
        return mean_square(x)

    return model, run, (tokens(length=196),)


# ---- what takes its time


def recurrent(of: type[nn.RNNCellBase], steps: int = 24) -> Made:
    """Cells of PyTorch in a loop that is unrolled."""
    cell: nn.Module = of(WIDTH, WIDTH)  # type: ignore[call-arg]
    head = nn.Linear(WIDTH, WIDTH)

    def run(x: Tensor) -> Tensor:
        state, carry, found = x.new_zeros(x.shape[1:]), x.new_zeros(x.shape[1:]), []
        for step in x:
            if of is nn.LSTMCell:
                state, carry = cell(step, (state, carry))
            else:
                state = cell(step, state)
            found.append(state)
        return mean_square(head(torch.stack(found)))

    return nn.ModuleList([cell, head]), run, (torch.randn(steps, 512, WIDTH),)


def state_space(steps: int = 32) -> Made:
    """A diagonal recurrence between two products, with a gate."""
    first, last = nn.Linear(WIDTH // 2, WIDTH), nn.Linear(WIDTH // 2, WIDTH // 2)
    decay = nn.Parameter(-torch.rand(WIDTH // 2))

    def run(x: Tensor) -> Tensor:
        x, gate = first(x).chunk(2, -1)
        state, found = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            state = state * decay.exp() + step
            found.append(state)
        return mean_square(last(torch.stack(found, 1) * F.silu(gate)))

    model = nn.ModuleList([first, last, nn.ParameterList([decay])])
    return model, run, (torch.randn(64, steps, WIDTH // 2),)


def fourier() -> Made:
    """A filter of complex numbers along the rows."""
    linear, kernel = nn.Linear(WIDTH, WIDTH), nn.Parameter(0.02 * torch.randn(129, WIDTH, dtype=torch.complex64))

    def run(x: Tensor) -> Tensor:
        return mean_square(F.gelu(linear(torch.fft.irfft(torch.fft.rfft(x, dim=1) * kernel, n=LENGTH, dim=1))))

    return nn.ModuleList([linear, nn.ParameterList([kernel])]), run, (tokens(),)


# ---- images, sounds, films


def depthwise() -> Made:
    """Inverted residuals of mobile networks, without the sum."""

    def block(of: int, to: int, stride: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(of, 4 * of, 1, bias=False), nn.BatchNorm2d(4 * of), nn.Hardswish()),
            *(nn.Conv2d(4 * of, 4 * of, 3, stride, 1, groups=4 * of, bias=False), nn.BatchNorm2d(4 * of)),
            *(nn.Hardswish(), nn.Conv2d(4 * of, to, 1, bias=False), nn.BatchNorm2d(to)),
        )

    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 100))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), block(16, 32, 2), block(32, 32, 1), *pool)
    inputs = (torch.randn(BATCH, 3, 128, 128), torch.randint(0, 100, (BATCH,)))
    return model, lambda x, y: F.cross_entropy(model(x), y), inputs


class Levels(nn.Module):
    """A UNet of batch norms that is made larger by transposed convolutions, or by interpolation."""

    def __init__(self, larger: str, width: int = 32) -> None:
        super().__init__()

        def two(of: int, to: int) -> nn.Module:
            convs = (nn.Conv2d(of, to, 3, padding=1), nn.Conv2d(to, to, 3, padding=1))
            return nn.Sequential(*(each for conv in convs for each in (conv, nn.BatchNorm2d(to), nn.ReLU())))

        def up(of: int, to: int) -> nn.Module:
            if larger == "transposed":
                return nn.ConvTranspose2d(of, to, 2, 2)
            return nn.Sequential(nn.Upsample(scale_factor=2, mode=larger), nn.Conv2d(of, to, 1))

        self.down1, self.down2, self.middle = two(3, width), two(width, 2 * width), two(2 * width, 4 * width)
        self.larger2, self.larger1 = up(4 * width, 2 * width), up(2 * width, width)
        self.up2, self.up1, self.out = two(4 * width, 2 * width), two(2 * width, width), nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        two = self.up2(torch.cat([two, self.larger2(self.middle(F.max_pool2d(two, 2)))], 1))
        out: Tensor = self.out(self.up1(torch.cat([one, self.larger1(two)], 1)))
        return out


def levels(larger: str) -> Made:
    model = Levels(larger)
    inputs = (torch.randn(4, 3, 96, 96), torch.randint(0, 4, (4, 96, 96)))
    return model, lambda x, y: F.cross_entropy(model(x), y), inputs


def adversarial() -> Made:
    """What makes images and what judges them, in one loss."""
    judge = nn.Sequential(
        *(nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2), nn.Conv2d(64, 1, 4)),
    )
    maker = nn.Sequential(
        *(nn.ConvTranspose2d(64, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1)),
    )

    def run(noise: Tensor, real: Tensor) -> Tensor:
        return F.softplus(-judge(real)).mean() + F.softplus(judge(maker(noise).tanh())).mean()

    return nn.ModuleList([judge, maker]), run, (torch.randn(16, 64, 8, 8), torch.randn(16, 3, 64, 64))


def convnext() -> Made:
    def layer() -> nn.Module:
        conv, norm = nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.LayerNorm(64)
        return nn.ModuleList([conv, norm, nn.Linear(64, 256), nn.Linear(256, 64)])

    layers: Any = nn.ModuleList(layer() for _ in range(2))
    stem = nn.Conv2d(3, 64, 4, 4)

    def run(x: Tensor) -> Tensor:
        x = stem(x)
        for conv, norm, up, down in layers:
            x = x + down(F.gelu(up(norm(conv(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return mean_square(x)

    return nn.ModuleList([stem, layers]), run, (torch.randn(BATCH, 3, 128, 128),)


def group_norms() -> Made:
    layers = (each for of in (3, 32) for each in (nn.Conv2d(of, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()))
    model = nn.Sequential(*layers, nn.Conv2d(32, 1, 1))
    inputs = (torch.randn(4, 3, 128, 128), torch.rand(4, 128, 128))
    return model, lambda x, y: F.binary_cross_entropy_with_logits(model(x)[:, 0], y), inputs


def sounds() -> Made:
    first = (nn.Conv1d(1, 64, 10, 5), nn.GroupNorm(8, 64), nn.GELU())
    model = nn.Sequential(*first, nn.Conv1d(64, 64, 3, 2), nn.GELU(), nn.Conv1d(64, 64, 3, 2), nn.GELU())
    return model, lambda x: mean_square(model(x)), (torch.randn(BATCH, 1, 32000),)


def films() -> Made:
    first = (nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2))
    model = nn.Sequential(*first, nn.Conv3d(16, 32, 3, padding=1), nn.ReLU())
    return model, lambda x: mean_square(model(x)), (torch.randn(2, 3, 16, 48, 48),)


# ---- others


class Experts(nn.Module):
    """A mixture of experts. Each computes all tokens, and counts for those that have chosen it."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, experts, bias=False), nn.ModuleList(mlp() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + torch.where(chosen == i, shares, 0.0).sum(-1, keepdim=True) * expert(x)
        return x + out


class Capacities(nn.Module):
    """Experts, each of which takes the tokens that want it most, as many as it has room for."""

    def __init__(self, rooms: Sequence[int]) -> None:
        super().__init__()
        self.gate, self.rooms = nn.Linear(WIDTH, len(rooms), bias=False), rooms
        self.experts = nn.ModuleList(mlp() for _ in rooms)

    def forward(self, x: Tensor) -> Tensor:
        wanted, out = self.gate(x).softmax(-1), torch.zeros_like(x)
        for i, (room, expert) in enumerate(zip(self.rooms, self.experts, strict=True)):
            share, at = wanted[:, i].topk(room)
            out = out.index_add(0, at, expert(x[at]) * share[:, None])
        return x + out


def experts(make: Callable[[], nn.Module]) -> Made:
    model = nn.Sequential(make(), make())
    return model, lambda x: mean_square(model(x)), (torch.randn(2048, WIDTH),)


def variational() -> Made:
    encoder, decoder = nn.Linear(1024, 512), nn.Sequential(nn.Linear(WIDTH, 512), nn.SiLU(), nn.Linear(512, 1024))
    mean, spread = nn.Linear(512, WIDTH), nn.Linear(512, WIDTH)

    def run(x: Tensor) -> Tensor:
        found = F.silu(encoder(x))
        a, b = mean(found), spread(found)
        drawn = a + torch.randn_like(a) * (0.5 * b).exp()
        spreading: Tensor = 0.5 * (1 + b - a.square() - b.exp()).mean()
        return F.mse_loss(decoder(drawn), x) - spreading

    return nn.ModuleList([encoder, decoder, mean, spread]), run, (torch.randn(2048, 1024),)


def batch_norms() -> Made:
    def layer() -> Sequence[nn.Module]:
        return nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1)

    model = nn.Sequential(*(each for _ in range(4) for each in layer()))
    return model, lambda x: mean_square(model(x)), (torch.randn(2048, 512),)


def messages() -> Made:
    """A graph network: each edge carries what its node computes, and each node adds up what arrives."""
    model = nn.ModuleList(nn.Linear(128, 128) for _ in range(2))

    def run(x: Tensor, of: Tensor, to: Tensor) -> Tensor:
        for linear in model:
            x = x + torch.zeros_like(x).index_add(0, to, F.relu(linear(x[of])))
        return mean_square(x)

    edges = (torch.randint(0, 2000, (16000,)) for _ in range(2))
    return model, run, (torch.randn(2000, 128), *edges)


def recommending() -> Made:
    """Embeddings of many columns, and the products of each pair of them (DLRM)."""
    columns, width = 8, 64
    embeddings = nn.ModuleList(nn.Embedding(5000, width) for _ in range(columns))
    first = nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, width))
    last = nn.Sequential(nn.Linear(36 + width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    rows, others = torch.tril_indices(columns + 1, columns + 1, -1)

    def run(numbers: Tensor, words: Tensor) -> Tensor:
        x = first(numbers)
        found = torch.stack([x, *(of(words[:, i]) for i, of in enumerate(embeddings))], 1)
        pairs = torch.bmm(found, found.transpose(1, 2))[:, rows, others]
        return F.softplus(last(torch.cat([x, pairs], 1))).mean()

    inputs = (torch.randn(4096, width), torch.randint(0, 5000, (4096, columns)))
    return nn.ModuleList([embeddings, first, last]), run, inputs


MODELS: Mapping[str, Callable[[], Made]] = {
    "low rank": lambda: blocks(LowRank),
    "attention spelled out": lambda: blocks(kind="spelled out"),
    "attention with a mask": lambda: blocks(kind="masked"),
    "norms in float32": half_precision,
    "teacher": teacher,
    "encoder and decoder": encoder_decoder,
    "modules of torch.nn": modules_of_torch,
    "modulated": modulated,
    "checkpointed": checkpointed,
    "several heads": several_heads,
    "loss in pieces": loss_in_pieces,
    "tied head": tied_head,
    "two towers": two_towers,
    "three of one": three_of_one,
    "mixer": mixer,
    "lstm cells": lambda: recurrent(nn.LSTMCell),
    "gru cells": lambda: recurrent(nn.GRUCell),
    "state space": state_space,
    "fourier": fourier,
    "depthwise": depthwise,
    "transposed": lambda: levels("transposed"),
    "nearest": lambda: levels("nearest"),
    "bilinear": lambda: levels("bilinear"),
    "adversarial": adversarial,
    "convnext": convnext,
    "group norms": group_norms,
    "sounds": sounds,
    "films": films,
    "experts": lambda: experts(Experts),
    "experts with capacities": lambda: experts(lambda: Capacities((1024, 512, 256, 256))),
    "variational": variational,
    "batch norms": batch_norms,
    "messages": messages,
    "recommending": recommending,
}
