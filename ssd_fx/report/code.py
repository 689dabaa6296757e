"""Code of graphs for people: the runtime's options once instead of in every node, and our calls marked."""

from __future__ import annotations

import re

import torch
from torch import fx

_ABOUT = re.compile(r"(ssd_fx\.begin_\.default\(.*), '[\w=-]{100,}'\)")  # the plan, which reports show elsewhere
_CALL = re.compile(r"^.*\btorch\.ops\.ssd_fx\.(\w+?)_?\.default\(.*$", re.MULTILINE)
_WORDS = {"wait_store": "release", "wait_load": "wait", "begin": "begin"}  # the nodes by their names in plans


def configuration(graph: fx.Graph) -> str:
    """The runtime's options as the nodes of a forward have them; "" in a graph without our nodes."""
    begin = next(iter(graph.find_nodes(op="call_function", target=torch.ops.ssd_fx.begin_.default)), None)
    return str(begin.args[1]) if begin is not None else ""


def told_once(code: str, config: str) -> str:
    """`code` with the name CONFIG wherever it has the text `config`, which a line at the top gives.

    The plan that the first node carries for reports is left out.
    """
    code = _ABOUT.sub(r"\1)", code)
    quoted = repr(config)
    if not config or quoted not in code:
        return code
    return f"CONFIG = {quoted}\n\n{code.lstrip().replace(quoted, 'CONFIG')}"


def marked(code: str) -> str:
    """Generated `code` with a mark behind every line that calls us."""
    return _CALL.sub(lambda line: f"{line[0]}  # <-- ssd_fx: {_WORDS.get(line[1], line[1])}", code)
