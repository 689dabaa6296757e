"""Inductor's lite mode (`mode="lite"`, `fallback_by_default`), in which only annotated nodes have their lowerings.

Hazard: without its lowering a release hands memory over that generated code still uses, and no audit reads the code. A
write that is not done would then store the values of a later kernel.
"""

from __future__ import annotations

from ssd_fx.compat import is_lite
from ssd_fx.passes.partition import Partition, calls_ours

_ANNOTATION = "compile_with_inductor"  # of `torch.fx.traceback.annotate`


def annotate_ours(partition: Partition) -> None:
    """Have Inductor take the lowerings of our nodes in lite mode, too."""
    if not is_lite():
        return
    for module in (partition.forward, partition.backward):
        for node in module.graph.nodes:
            if calls_ours(node):
                node.meta["custom"] = {**(node.meta.get("custom") or {}), _ANNOTATION: 0}
