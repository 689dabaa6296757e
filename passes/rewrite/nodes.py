"""What both graphs' writers of nodes share: inserting nodes in planned order, and stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.compat import FakeTensorMode
from ssd_fx.passes.groups import AliasGroup


@dataclass(frozen=True)
class Insertion:
    """A node to insert before the node at `position` of the original graph; `rank` orders those at one position."""

    position: int
    rank: tuple[int, ...]
    group: AliasGroup
    build: Callable[[AliasGroup, int], None]


def insert_all(graph: fx.Graph, nodes: list[fx.Node], todo: list[Insertion]) -> None:
    """Build the nodes in planned order, and number them.

    Those of equal position and rank are in the order of slots. The simulated step has the same order, because transfers
    are made in the order of their nodes.
    """
    for seq, item in enumerate(sorted(todo, key=lambda i: (i.position, i.rank, i.group.slot))):
        with graph.inserting_before(nodes[item.position]):
            item.build(item.group, seq)


def first_compute(nodes: list[fx.Node]) -> fx.Node:
    return next(n for n in nodes if n.op != "placeholder")


def stand_in(mode: FakeTensorMode, saved: torch.Tensor) -> torch.Tensor:
    """The FakeTensor of what is saved instead of `saved`."""
    with mode:
        made: torch.Tensor = torch.ops.ssd_fx.stand_in(saved.shape, saved.dtype, saved.device)
    return made
