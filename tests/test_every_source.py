"""Toys, compiled once, under every source of a loaded value: bit for bit the gradients of everything kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ssd_fx
from tests import sources
from tests.passes import toys


def condition(x: Tensor, w: Tensor) -> Tensor:
    """linalg.cond saves the tail of a storage: a slice that does not begin it."""
    return torch.linalg.cond(x @ w) * (x @ w).sum()


def sort_s_tail(x: Tensor, w: Tensor) -> Tensor:
    """The largest of sorted values and their indices: a slice of both is needed."""
    values, indices = (x @ w).sort(dim=0)
    return (values[5:] @ w).sum() + (values[5:] * indices[5:]).sum()


def matrix_norms(x: Tensor, w: Tensor) -> Tensor:
    """Singular values, of which the extremes are looked at."""
    singular = torch.linalg.svdvals(x @ w)
    return singular[-1] / singular[0] + torch.linalg.matrix_norm(x @ w, 2)


ONLY_LEAVES = (toys.saved_output, toys.view_of_output)  # their activations are outputs, which stay
TOYS = (*(toy for toy in toys.ALL if toy not in ONLY_LEAVES), condition, sort_s_tail, matrix_norms)


def train(toy: Callable[..., object], size: int = 8) -> list[Tensor]:
    """Outputs and gradients."""
    args = toys.inputs(size)
    torch.manual_seed(0)
    outputs = toy(*args)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    loss = sum((o.float() * (k + 1)).sum() for k, o in enumerate(outputs))
    gradients = torch.autograd.grad(loss, args, allow_unused=True)  # type: ignore[arg-type]
    return [t.detach() for t in (*outputs, *gradients) if t is not None]


# With inner="aot_eager" nothing is stored. Inductor fuses such a graph otherwise (a product and a sum into one call).
# So there the same graph runs on the engine in memory, whose values do not depend on when anything happens.
_KEPT: dict[str, dict[str, object]] = {"aot_eager": {"budget": 1.0}, "inductor": {"engine": "memory"}}


def every_source(toy: toys.Toy, inner: str) -> None:
    options = sources.OPTIONS | {"inner": inner} | _KEPT[inner]
    kept = train(torch.compile(toy, backend=ssd_fx.backend, options=options))
    torch._dynamo.reset()
    compiled = torch.compile(toy, backend=ssd_fx.backend, options=sources.OPTIONS | {"inner": inner})
    for source in sources.ALL:
        with source.forced():
            found = train(compiled)
            source.check(ssd_fx.stats())
        same = [torch.equal(a, b) for a, b in zip(kept, found, strict=True)]
        assert all(same), f"{source.name}: of outputs and gradients these are the same: {same}"


WAYS = {  # in which what is in memory is loaded, beside what `Source.means` says
    "given_away": {"given"},
    "given_away_just_written": {"written"},
    "copied": {"copied"},
    "resident": {"given"},
    "write_failed": {"given"},
    "no_room": {"given"},
    "put_aside": {"given", "aside"},
    "decoded_from_memory": {"copied"},
}


def test_no_two_sources_are_the_same() -> None:
    """Else one of them would test nothing of its own."""
    compiled = torch.compile(toys.relu_chain, backend=ssd_fx.backend, options=sources.OPTIONS)
    all_found = set()
    for name, source in sources.SOURCES.items():
        with source.forced():
            train(compiled)
            source.check(ssd_fx.stats())
        found = set[str]().union(*source.loads)
        assert found & sources.MORE - {"ahead"} == WAYS.get(name, set()), name
        all_found.add(frozenset(found))
    assert len(all_found) == len(sources.ALL)


@pytest.mark.parametrize("toy", TOYS, ids=toys.name)
def test_toys(toy: toys.Toy) -> None:
    every_source(toy, "aot_eager")


INDUCTOR = (toys.views_only, toys.narrow, condition)  # shared, with an offset, behind library calls


@pytest.mark.parametrize(
    "toy", [pytest.param(t, marks=() if t in INDUCTOR else pytest.mark.slow) for t in TOYS], ids=toys.name
)
def test_toys_through_inductor(toy: toys.Toy) -> None:
    every_source(toy, "inductor")


def patched(array: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return (torch.index_put(array, (index,), w).sin() * w.mean()).sum()


def patched_again(array: Tensor, index: Tensor, w: Tensor) -> Tensor:
    """The backward patches the loaded array once more, and Inductor does that in place."""
    return checkpoint(patched, array, index, w, use_reentrant=False)  # type: ignore[no-any-return]


def test_an_array_that_only_the_forward_had_is_not_written_into() -> None:
    """`torch.from_numpy(array)` without a name: after the forward no tensor of the caller's is on its memory."""
    options = sources.OPTIONS | {"inner": "inductor"}
    compiled = torch.compile(patched_again, backend=ssd_fx.backend, options=options)
    index, w = torch.arange(4), torch.randn(4, 64, requires_grad=True)
    array = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    before = array.copy()
    for source in sources.ALL:
        with source.forced():
            compiled(torch.from_numpy(array), index, w).backward()
            source.check(ssd_fx.stats())
        assert (array == before).all(), source.name
