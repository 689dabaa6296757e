"""Toys, compiled once, under every source of a loaded value: bit for bit the gradients of everything kept."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ssd_fx
from tests import sources
from tests.bitwise import is_same, kept, ours, prove_bitwise, run
from tests.passes import toys
from tests.planned_order import assert_in_planned_order


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
    all_found = set()
    for name, source in sources.SOURCES.items():
        with source.forced():
            toys.trained(toys.relu_chain)(ours(sources.OPTIONS))
            source.check(ssd_fx.stats())
        found = set[str]().union(*source.loads)
        assert found & sources.MORE - {"ahead"} == WAYS.get(name, set()), name
        all_found.add(frozenset(found))
    assert len(all_found) == len(sources.ALL)


@pytest.mark.parametrize("toy", TOYS, ids=toys.name)
def test_toys(toy: toys.Toy) -> None:
    prove_bitwise(toys.trained(toy), [kept(sources.OPTIONS), ours(sources.OPTIONS)], sources.ALL)
    if toy in toys.ALL:
        stats = ssd_fx.stats()
        inputs = stats.held_bytes  # here they are leaves, which their owner holds
        assert stats.offloaded_bytes == toys.planned(toy).plan.offloaded_bytes + inputs


FUSED = (toys.slice_of_big_base, toys.saved_copies)
INDUCTOR = (toys.views_only, toys.narrow, condition, *FUSED)  # shared, with an offset, behind library calls


@pytest.mark.parametrize(
    "toy", [pytest.param(t, marks=() if t in INDUCTOR else pytest.mark.slow) for t in TOYS], ids=toys.name
)
def test_toys_through_inductor(toy: toys.Toy) -> None:
    """With everything kept Inductor may fuse otherwise, such as a product and a sum into one call, whose last bit is
    another; not in `FUSED`, where that would be our fault."""
    program, options = toys.trained(toy), sources.OPTIONS | {"inner": "inductor"}
    other_code = run(program, ours(options, budget=1.0))
    found = prove_bitwise(program, [kept(options), ours(options)], sources.ALL)
    near = is_same if toy in FUSED else partial(torch.allclose, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert all(near(a, b) for a, b in zip(found, other_code, strict=True))
    assert_in_planned_order()


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
