"""Faults of the kind that only a device shows: each is planted for the rest of the process."""

from __future__ import annotations

from typing import Any

from ssd_fx.runtime.device import streams
from ssd_fx.runtime.layout import drop_storage
from ssd_fx.runtime.store import Store
from tests.cuda_values import cuda_names
from tests.cuda_values.staged import LateDriver
from tests.runtime.fake_gpu import FakeStream


def no_wait() -> None:
    """Generated code has no wait between a load and its reader."""
    cuda_names.without_waits = True


def unordered() -> None:
    """A transfer does not wait for the kernels that were queued before it."""
    LateDriver._cuEventSynchronize = lambda *_: None  # type: ignore[method-assign,assignment]
    start = streams.Queued.start

    def started(self: Any) -> None:
        wait, FakeStream.wait_event = FakeStream.wait_event, lambda *_: None  # type: ignore[method-assign]
        try:
            start(self)
        finally:
            FakeStream.wait_event = wait  # type: ignore[method-assign]

    streams.Queued.start = started  # type: ignore[method-assign]


def early_release() -> None:
    """The runtime drops the tensor at its release, without looking whether it is written. Nobody waits for that."""
    wait_store_ = Store.wait_store_

    def released(self: Store, entry: Any, keepalive: Any, seq: int, *_: bool) -> None:
        wait_store_(self, entry, keepalive, seq, hand_over=True)
        if entry.write:
            held, entry.held = entry.held, None
            if held is entry.counter:
                drop_storage(held)

    Store.wait_store_ = released  # type: ignore[method-assign,assignment]


PLANTS = {plant.__name__: plant for plant in (no_wait, unordered, early_release)}
