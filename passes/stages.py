"""The code of the graphs after each pass that changed something: for dumps and for PyTorch's structured trace.

joint, rejoin_views, partition_forward, partition_backward, insert_forward, insert_backward, ...
"""

from __future__ import annotations

from torch import fx


class Stages:
    """Collects code; `found` has it by name, in the order of the passes. Switched off, it does nothing."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.found: dict[str, str] = {}
        self._now: dict[str, str] = {}

    def after(self, name: str, **graphs: fx.GraphModule) -> None:
        """Takes the code of `graphs`, each under the name of its part, if the pass `name` has changed it."""
        if not self.on:
            return
        for part, module in graphs.items():
            code = module.print_readable(print_output=False)
            if self._now.get(part) != code:
                self.found[f"{name}_{part}" if part != "joint" else name] = code
                self._now[part] = code
