"""What random callers call: small modules, each with a hazard of its own. All take and return tensors of [rows, WIDTH].

Their parameters come from a generator of their own, so that every run of a program has the same ones.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS = 6, 9


class Mlp(nn.Module):
    """linear -> relu -> sin -> linear"""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.into(x)).sin())


class Norm(nn.Module):
    """A residual around a layer norm, whose statistics are saved beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Attention(nn.Module):
    """Rows attend to each other: views, transposed ones too, of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(x.shape[0], 2, -1).transpose(0, 1) for t in self.qkv(x).chunk(3, dim=-1))
        return ((q @ k.mT).softmax(-1) @ v).transpose(0, 1).reshape(x.shape[0], -1)


class Chunk(nn.Module):
    """Parts of one tensor; the result is saved by what made it, and is the caller's to overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x @ self.weight).chunk(2, dim=-1)
        return torch.sigmoid(a * b.tanh())


class Sort(nn.Module):
    """Integers are saved, and a slice of a wider tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values, _ = (x * self.weight).sort(-1)
        return values * values.topk(3, dim=-1).values.sum(-1, keepdim=True).sin() + values.sin()[:, :1]


class Drop(nn.Module):
    """Dropout of nothing: copies that a compiler may take out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(self.linear(x), 0.0).exp(), 0.0).cos()


class Cond(nn.Module):
    """An operator whose backward reads one element of what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        square = (x.mT @ x).float() + 4 * torch.eye(WIDTH)
        return (x @ self.weight) * torch.linalg.cond(square).log().to(x.dtype)


class Running(nn.Module):
    """A buffer that every forward changes, as batch norm does."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.mul_(0.5).add_(y.detach().mean(0))
        return y.sin() * self.seen


class Embed(nn.Module):
    """Takes indices of [rows]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, index: Tensor) -> Tensor:
        return self.linear(self.words(index)).square()


class Pair(nn.Module):
    """Takes two tensors, which may be one, or views of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x.sin() * y).tanh() * x


class Views(nn.Module):
    """Returns two tensors that share memory, which is saved too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x).exp()
        return y * x, y.view(-1, 2, WIDTH // 2).flatten(1)


class Overwrites(nn.Module):
    """Writes into what it is given, which must be no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight[0]
        x.mul_(0.5)
        return (y.sin() @ self.weight) * x.cos()


class _Keeps(torch.autograd.Function):
    """exp(x * scale).sin() * x, which keeps its input, what it has computed and what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.x, ctx.inner = x, (x * scale).exp()
        ctx.result = ctx.inner.sin() * x
        ctx.save_for_backward(ctx.inner[:, 1:], scale)
        return ctx.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        part, scale = ctx.saved_tensors
        inner = grad * ctx.inner.cos() * ctx.x * ctx.inner + part.sum(-1, keepdim=True) * ctx.result
        return inner * scale + grad * ctx.inner.sin(), (inner * ctx.x).sum(0)


class Keeps(nn.Module):
    """A function of one's own, whose context keeps tensors that autograd does not check."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(_Keeps.apply(x.tanh(), self.scale)).sin() + _Keeps.apply(x, self.scale)  # type: ignore


BLOCKS: dict[str, type[nn.Module]] = {
    b.__name__: b
    for b in (Mlp, Norm, Attention, Chunk, Sort, Drop, Cond, Running, Embed, Pair, Views, Overwrites, Keeps)
}
_copies = 0


def copy_of(block: type[nn.Module]) -> type[nn.Module]:
    """The same class with code of its own, of which `torch.compile` knows nothing yet."""
    global _copies
    _copies += 1
    given = block.forward
    code = given.__code__.replace(co_filename=f"<copy {_copies}>")
    forward = types.FunctionType(code, given.__globals__, given.__name__, given.__defaults__, given.__closure__)
    return type(block.__name__, (block,), {"forward": forward})
