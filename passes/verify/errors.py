"""The error for a broken rule. It names the rule, the pass that must keep it, and the nodes around the fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import fx

T = TypeVar("T")
REACH = 5  # lines shown on either side of the fault


class VerifyError(RuntimeError):
    """A plan, a rewritten graph or generated code breaks a rule: a bug in a pass, never the fault of a model."""


def require(holds: bool, text: str, culprit: str, at: fx.Node | None = None) -> None:
    """Raise an error unless the rule holds; `culprit` is the pass that must keep it, `at` the node that is wrong.

    Raises:
        VerifyError: with `text`, `culprit` and the nodes around `at`.
    """
    if holds:
        return
    message = f"{text}; see pass {culprit!r}"
    if at is not None:
        nodes = list(at.graph.nodes)
        message += f"\n{around(nodes, nodes.index(at), lambda n: n.format_node() or n.name)}"
    raise VerifyError(message)


def around(lines: Sequence[T], index: int, text: Callable[[T], str]) -> str:
    """The lines around a fault, with an arrow at it; `text` is how each is shown."""
    first = max(0, index - REACH)
    near = enumerate(lines[first : index + REACH + 1], first)
    return "\n".join(f"{'-->' if i == index else '   '} {text(line)}" for i, line in near)
