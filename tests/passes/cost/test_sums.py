"""Which additions belong to a long sum."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ssd_fx.passes.cost.sums import LEAST, SHORT, running_sums

LARGE = torch.zeros(LEAST // 4)


def total(terms: list[Tensor]) -> Tensor:
    out = terms[0]
    for term in terms[1:]:
        out = out + term
    return out


def found(function: object, *args: Tensor) -> list[str]:
    graph: fx.Graph = make_fx(function)(*args).graph  # type: ignore[operator]
    return sorted(n.name for n in running_sums(list(graph.nodes)))


def test_of_a_long_sum_all_but_the_last_addition() -> None:
    sines = [f"add_{i}" if i else "add" for i in range(SHORT - 1)]
    assert found(lambda x: total([x.sin() for _ in range(SHORT + 1)]).exp(), LARGE) == sorted(sines)


def test_a_short_sum_stays_as_it_is() -> None:
    assert found(lambda x: total([x.sin() for _ in range(SHORT)]).exp(), LARGE) == []


def test_a_sum_of_small_tensors_stays_as_it_is() -> None:
    assert found(lambda x: total([x.sin() for _ in range(2 * SHORT)]).exp(), LARGE[1:]) == []


def test_a_sum_within_a_sum_counts_its_terms() -> None:
    half = (SHORT + 1) // 2

    def function(x: Tensor) -> Tensor:
        halves = [total([x.sin() for _ in range(each)]) for each in (half, SHORT + 1 - half)]
        return (halves[0] + halves[1]).exp()

    assert len(found(function, LARGE)) == SHORT - 1


def test_terms_and_sums_that_something_else_reads() -> None:
    """They live on, whenever they are added."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        term = x.sin()
        return total([term] * (SHORT + 1)).exp(), term

    def running(x: Tensor) -> tuple[Tensor, ...]:
        sums = [x.sin()]
        for _ in range(SHORT + 1):
            sums.append(sums[-1] + x.sin())
        return tuple(sums)

    assert found(function, LARGE) == []
    assert found(running, LARGE) == []


def test_terms_of_another_shape_or_with_a_factor() -> None:
    row = torch.zeros(1, LEAST // 8)

    def broadcast(x: Tensor) -> Tensor:
        return total([x.sin().expand(2, -1), *(x.sin() for _ in range(SHORT + 1))]).exp()

    def scaled(x: Tensor) -> Tensor:
        out = x.sin()
        for _ in range(SHORT + 1):
            out = torch.add(out, x.sin(), alpha=2)
        return out.exp()

    assert found(broadcast, row) == []
    assert found(scaled, LARGE) == []
