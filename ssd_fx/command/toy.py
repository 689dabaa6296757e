"""Steps of a small GPT in a process of its own, for `ssd-fx bench`.

Resident memory is that of the process (VmHWM of proc(5)), so a process trains in one way only.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The model and its batch: layers, width of a layer, heads, sequences in a batch, tokens in a sequence."""

    layers: int
    width: int
    heads: int
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, batch {self.batch} x {self.seq} tokens"


@dataclass(frozen=True)
class Step:
    """One training step. `resident_bytes`: the most memory of the process in it. `moved`: of `ssd_fx.stats()`."""

    seconds: float
    resident_bytes: int
    loss: float
    moved: dict[str, float] = field(default_factory=dict)


class GPT(nn.Module):
    """Pre-LayerNorm, with dropout of 0.1 and tied embedding. Returns the loss, so that one graph holds a step."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        made = {"dropout": 0.1, "activation": F.gelu, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width, **made)  # type: ignore[arg-type]
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of the next token; `tokens`: int64 [batch, seq]."""
        x = self.tokens(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], x.device, x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = F.linear(self.norm(x[:, :-1]), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(shape: Shape, options: dict[str, Any] | None) -> Iterator[Step]:
    """Endless steps: with ssd_fx under `options`, or under plain Inductor for None."""
    import ssd_fx

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    backend = "inductor" if options is None else ssd_fx.backend
    compiled = torch.compile(model, backend=backend, options=options)
    tokens = torch.randint(VOCABULARY, (shape.batch, shape.seq), device=device)
    while True:
        ssd_fx.reset_stats()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        value = loss.item()  # waits for a GPU
        seconds = time.perf_counter() - started
        moved = {} if options is None else ssd_fx.stats().as_dict()
        yield Step(seconds, _peak_bytes(), value, moved)


def _peak_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def _work(pipe: Connection, shape: Shape, options: dict[str, Any] | None) -> None:
    """Answer everything that comes through `pipe` with a step, or with the error that ended the training."""
    steps = train(shape, options)
    try:
        while pipe.recv():
            pipe.send(next(steps))
    except EOFError:
        return  # the command has ended
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def ask(pipe: Connection) -> Step:
    """One step of the process at the other end of `pipe`.

    Raises:
        RuntimeError: the training failed; the text says how.
    """
    try:
        pipe.send(True)
        answer: Step | str = pipe.recv()
    except (EOFError, OSError):
        raise RuntimeError("the training process ended; perhaps the kernel had no memory left for it") from None
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


@contextmanager
def worker(shape: Shape, options: dict[str, Any] | None) -> Iterator[Callable[[], Step]]:
    """A process that trains until the end of the context, and what makes a step of it (`ask`).

    Ctrl-C does not reach the process: that ends the context.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, shape, options), daemon=True)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process inherits it, and its compiler processes
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, handler)
    theirs.close()
    try:
        with ours:
            yield partial(ask, ours)
        process.join(timeout=60)  # it has read the end of the pipe
    finally:
        process.kill()
