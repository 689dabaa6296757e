"""Which codec encodes a tensor, and what is learnt of that."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ssd_fx.options import Options
from ssd_fx.runtime import codec
from ssd_fx.runtime.adapt.habits import PLAIN, Habits
from ssd_fx.runtime.codec import Encoded
from ssd_fx.runtime.memory import tensors
from ssd_fx.runtime.states import Entry
from ssd_fx.runtime.stats import counters


class Payload(NamedTuple):
    """An encoded tensor. `error`: the relative one of a lossy codec, None if it was not measured."""

    tensor: Tensor
    encoded: Encoded
    error: float | None


class Encoder:
    """Encodes tensors that are on their way to a tier that has a codec. `codecs`: their names by tier.

    Encoding takes long, so `encode` runs without the lock of `entries`. All other methods run under it.
    """

    def __init__(self, config: Options, habits: Habits) -> None:
        self.codecs = dict(config.compression)
        self._habits = habits

    def codec_of(self, entry: Entry) -> str:
        """The codec of the tier that the plan names, even if the tensor ends up in another or moves on; or empty."""
        return self.codecs.get("host" if entry.tier == "host" else "ssd", "") if self.codecs else ""

    def stored(self, entry: Entry) -> None:
        """Counts a store, so that a codec which did not shrink an earlier tensor of the slot is tried again in time."""
        self._habits.of(entry.graph, entry.slot).stored()

    def wants(self, entry: Entry, name: str) -> bool:
        """Whether a codec is to encode what an entry holds. Asked before it is resident, and again before its write."""
        if not name or entry.encoded or name in self._habits.of(entry.graph, entry.slot).plain:
            return False
        # The values in the gaps of a tensor would change the scale of their block.
        return entry.layout == entry.seen or not codec.is_lossy(name, entry.layout.dtype)

    def encode(self, entry: Entry, name: str, x: Tensor) -> Payload | None:
        """`x`, which an entry holds, in its encoded form; None if it stays as it is."""
        made = codec.encode(name, x)
        if made is None:
            return None
        payload, encoded = made
        error = None
        if encoded.lossy and self._habits.of(entry.graph, entry.slot).error is None:
            decoded = tensors.empty(entry.layout, entry.device)
            encoded.decode(payload, decoded)
            error = codec.relative_error(x, decoded)
        return Payload(payload, encoded, error)

    def learn(self, entry: Entry, name: str, made: Payload | None) -> None:
        """Records how a tensor of an entry's slot was encoded; None: it stayed as it is."""
        habit = self._habits.of(entry.graph, entry.slot)
        if made is None:
            if not codec.is_lossy(name, entry.layout.dtype):  # a lossy one refuses infinities, which may not come again
                habit.plain[name] = PLAIN
            return
        if made.error is not None:
            habit.error = made.error
        counters(entry.graph).encoded(entry.nbytes, made.encoded.nbytes, habit.error or 0.0)
