"""The error for a broken rule. It names the rule, the pass that must keep it, and the nodes around the fault."""

from __future__ import annotations

from torch import fx

REACH = 5  # nodes shown on either side of the fault


class VerifyError(RuntimeError):
    """A plan, a rewritten graph or generated code breaks a rule: a bug in a pass, never the fault of a model."""


def require(holds: bool, text: str, culprit: str, at: fx.Node | None = None) -> None:
    """Raise an error unless the rule holds; `culprit` is the pass that must keep it, `at` the node that is wrong.

    Raises:
        VerifyError: with `text`, `culprit` and the nodes around `at`.
    """
    if not holds:
        where = f"\n{_around(at)}" if at is not None else ""
        raise VerifyError(f"{text}; see pass {culprit!r}{where}")


def _around(node: fx.Node) -> str:
    """The nodes around `node` in its graph, one a line, with an arrow at it."""
    nodes = list(node.graph.nodes)
    index = nodes.index(node)
    first = max(0, index - REACH)
    near = nodes[first : index + REACH + 1]
    return "\n".join(f"{'-->' if n is node else '   '} {n.format_node() or n}" for n in near)
