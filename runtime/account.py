"""The option `memory`: measures the memory of a step at every node, and sets how much may be held for the backward.

`allowance.py` has the rule. The writer counts what is held (`Writer.held_bytes`), and obeys `Account.allowed`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ssd_fx.options import Options
from ssd_fx.runtime.allowance import Allowance, Seen, Steady
from ssd_fx.runtime.memory.gauge import Gauge, gauge

AUTO = 0.95  # of what this process could have: it takes memory for other things than tensors too

LATE = 64  # forwards: by then an optimizer of torch has stepped, or there is none

when_steady: list[Callable[[Options, Steady], None]] = []
"""Functions that get a store's options and what its steps leave, once that is steady. The next step's first forward
calls them."""

_optimizer_steps = 0
_hooked = False


def _note_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


def limit_of(memory: int | float | str, ranks: int, found: Gauge, device: torch.device) -> int:
    """The bytes that `memory` stands for (`Options`). Ranks that compute on the CPU share what is free there."""
    if isinstance(memory, int):
        return memory
    sharing = ranks if device.type == "cpu" else 1
    if memory == "auto":
        own = found.live_bytes()
        return int(AUTO * (own + (found.spare_bytes() - own) // sharing))
    return int(float(memory) * found.total_bytes() / sharing)


class Account:
    """The account of one store. `held`, `outstanding`: return the writer's bytes. `allow`: `Residency.allow`.

    All methods run under the lock of `entries`.
    """

    def __init__(
        self,
        memory: int | float | str,
        ranks: int,
        held: Callable[[], int],
        outstanding: Callable[[], int],
        allow: Callable[[int], None],
    ) -> None:
        global _hooked
        if not _hooked:
            register_optimizer_step_post_hook(_note_step)
            _hooked = True
        self._memory = memory
        self._ranks = ranks
        self._held = held
        self._outstanding = outstanding
        self._allow = allow
        self._gauge: Gauge | None = None
        self._allowance: Allowance | None = None
        self._steps = -1  # steps that optimizers had made when the last forward began
        self._before = _optimizer_steps  # steps that they had made before this account
        self._begun = 0  # forwards so far
        self._outstanding_before = 0  # bytes outstanding when the last node ended

    @property
    def seen(self) -> Seen | None:
        """The memory that the last step took; None before one has ended."""
        return self._allowance.seen if self._allowance else None

    def begins(self, graph: str, saved: int, device: torch.device) -> None:
        """Records that a forward begins on `device`, and will save `saved` bytes. Sets what may be held from now on."""
        if self._allowance is None:
            self._meet(device)
        if self._gauge is None or self._allowance is None:
            return
        self.look()
        optimized = self._steps != _optimizer_steps
        first, self._steps = self._steps <= self._before < _optimizer_steps, _optimizer_steps
        outstanding = self._waiting(self._held())
        self._gauge.look_around(for_tensors=not self._allowance.is_known(graph, saved, optimized, outstanding))
        if self._memory == "auto":
            self._allowance.limit = limit_of(self._memory, self._ranks, self._gauge, device)
        self._allowance.wasted(self._gauge.waste_bytes())
        base = self._gauge.live_bytes() - self._held()
        self._begun += 1
        self._allowance.complete = self._before < _optimizer_steps or self._begun > LATE
        self._allowance.begins(graph, saved, base, optimized, outstanding)
        if first:
            self._allowance.unsettle()  # an optimizer makes its state in its first step
        self._allow(self._allowance.most)

    def allowed(self, outstanding: int) -> int:
        """The most bytes that may be held while `outstanding` bytes are outstanding; 0 before the first forward."""
        return self._allowance.allowed(outstanding) if self._allowance else 0

    def steady(self) -> Steady | None:
        """As `Allowance.steady`; None before an optimizer has made its state."""
        if self._allowance is None or self._steps <= self._before:
            return None
        return self._allowance.steady()

    def turns(self) -> None:
        """Records that the backward loads a tensor."""
        if self._allowance:
            self._allowance.turns()

    def look(self) -> None:
        """Notes the peak since the last node, when a node of ours begins. Handles may have died meanwhile, so the
        larger of the outstanding bytes of then and of now counts."""
        if self._gauge and self._allowance:
            held = self._held()
            waiting = max(self._outstanding_before, self._waiting(held))
            self._allowance.note(self._gauge.peak_bytes(), held, waiting)

    def settled(self) -> None:
        """Notes what lives when a node of ours ends. The node changes what is held, so its own peak does not count."""
        if self._gauge and self._allowance:
            held = self._held()
            self._outstanding_before = self._waiting(held)
            self._allowance.note(self._gauge.begin(), held, self._outstanding_before)

    def _waiting(self, held: int) -> int:
        """The outstanding bytes, at least `held`: a backward with `retain_graph` leaves held what it has asked for."""
        return max(held, self._outstanding())

    def _meet(self, device: torch.device) -> None:
        """Makes the gauge and the allowance, at the first forward."""
        self._gauge = gauge(device)
        if self._gauge is not None:
            self._allowance = Allowance(limit_of(self._memory, self._ranks, self._gauge, device))
            if device.type != "cpu":
                self._allowance.capacity = self._gauge.spare_bytes()
            return
        self._allowance = Allowance(0)
        warnings.warn(
            f"nothing counts the tensors of {device.type}, so with memory={self._memory!r} none that can leave stays: "
            "on the CPU that is ssd_fx's allocator (cpu_allocator); right would be that, or a budget",
            RuntimeWarning,
            stacklevel=2,
        )
